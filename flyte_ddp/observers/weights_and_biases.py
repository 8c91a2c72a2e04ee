"""The observer that shows a run in Weights & Biases.

It runs in the parent process, which has the API key; no rank ever sees it. Imports wandb when a run
starts, which takes 1.5 s.

`flytekitplugins.wandb.wandb_init` is not used for three reasons. Outside a local run it requires a
key, while `Wandb` then records the run offline. An error in it fails the task. It takes the run's
id from the attempt's host name, so every retry starts another run, while `Wandb` continues the
existing one.
"""

from __future__ import annotations

import html
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.events import Histogram, Prediction, RunFinished, RunStarted
from flyte_ddp.observers.recorder import Entry, Recorder
from flyte_ddp.storage import SHORT_TIMEOUT, fetch_file, redact_url, write_file

# Seconds for W&B to answer at a start. The sum of all timeouts is less than the launcher waits for.
INIT_TIMEOUT = 30.0
# Seconds in which W&B's own process writes the last files of an offline run, after `finish`.
WRITE_SECONDS = 5.0

# W&B's own directories, by the variables that move them.
OWN_DIRECTORIES = {
    "WANDB_CACHE_DIR": "~/.cache/wandb",
    "WANDB_CONFIG_DIR": "~/.config/wandb",
    "WANDB_DATA_DIR": "~/.local/share/wandb",
}


@dataclass(eq=False)
class Wandb(Recorder):
    """Shows a run in Weights & Biases. A failure of W&B never affects the training.

    Without a key the run is recorded offline, and a line shows how to upload it. `WANDB_MODE` and
    W&B's other environment variables work as usual. The stop button on W&B's page interrupts this
    process like Ctrl-C.

    W&B's own step counter cannot go back as a resumed run's steps do, so the x axes are metrics of
    ours, "step" and "epoch". The key is WANDB_API_KEY in `keys`, or in the environment, or
    comes from `wandb login`.
    """

    service, label = "W&B", "W&B run"
    close_timeout = INIT_TIMEOUT + SHORT_TIMEOUT + WRITE_SECONDS

    project: str  # created if missing
    run_id: str  # the same in every attempt of one run; letters, digits, "-" and "_"
    directory: str | Path  # place for W&B's files; created if missing
    _: KW_ONLY
    # Directory to which an offline run is copied at the end, as one archive. Set it if
    # `directory` is lost with the process, as in a pod; "" leaves the run in `directory`.
    offline_url: str = ""

    def __post_init__(self) -> None:
        self.keys = {"WANDB_API_KEY": os.environ.get("WANDB_API_KEY", ""), **self.keys}
        self.is_off = os.environ.get("WANDB_MODE") == "disabled"  # saves the import, 1.5 s

    def _close(self, status: str) -> None:
        finished = self._state.finished
        try:
            if finished and finished.model_state_url and not self.is_off:
                self._record_model(finished)
        finally:
            self._run.finish(exit_code=int(status != "FINISHED"))
        if self._run.offline and self.offline_url:
            time.sleep(WRITE_SECONDS)
            self._keep_offline_run()

    def _keep_offline_run(self) -> None:
        """Copy the files of an offline run to `offline_url` and print how to upload them to W&B."""
        files = Path(self._run.settings.sync_dir)
        with tempfile.TemporaryDirectory() as directory:
            archive = shutil.make_archive(
                f"{directory}/{files.name}", "zip", files.parent, files.name
            )
            url = f"{self.offline_url.rstrip('/')}/{files.name}.zip"
            write_file(url, Path(archive).read_bytes(), timeout=SHORT_TIMEOUT)
        self.say(
            f"W&B: the offline run is kept at {redact_url(url)}; to upload it, download, "
            f"unzip, then: wandb sync {files.name}"
        )

    def _open(self, event: RunStarted, config: Mapping[str, Any]) -> None:
        if self._run is None:
            self._start()
        import wandb

        self._run.config.update(config, allow_val_change=True)
        # nodes without edges, as `wandb.watch(log_graph=True)` records them
        graph = wandb.Graph("torch")
        for index, layer in enumerate(event.layers):
            graph.add_node(
                id=index,
                name=layer.name,
                class_name=layer.kind,
                output_shape=layer.output_shape,
                num_parameters=[layer.num_parameters],
            )
        if event.layers:
            self._run.summary["graph_0"] = graph

    def _log(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            row = {name: _media(value) for name, value in entry.values.items()}
            if entry.alert:
                self._run.alert("Bad step", entry.alert)
            if not entry.axis:
                self._run.summary.update(row)
                continue
            if entry.axis == "step" and entry.epoch is not None:
                row["train/epoch"] = entry.epoch
            self._run.log({entry.axis: entry.place, **row})

    def _image(self, step: int, name: str, png: bytes) -> None:
        self._run.log({"step": step, name: _picture(png)})

    def _start(self) -> None:
        """Start or continue W&B's run, and print its URL or why it is offline."""
        directory = Path(self.directory).absolute()
        _set_environment(directory)
        import wandb

        # W&B's own output would damage the progress bar
        session = wandb.setup(wandb.Settings(silent=True))
        mode: Any = os.environ.get("WANDB_MODE") or session.settings.mode
        api_key = self.keys["WANDB_API_KEY"] or None
        reason = ""
        if mode in ("offline", "dryrun"):
            reason = f"WANDB_MODE is {mode}"
        elif not api_key and not wandb.login(prompt=False, verify=False):
            reason = "no API key was found"
        if reason:
            mode = "offline"
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            id=self.run_id,
            name=self.name,
            group=self.group,
            notes=self.notes,
            dir=str(directory),
            mode=mode,
            resume="allow",
            # does not touch a run of the user's own, and allows several of ours
            reinit="create_new",
            save_code=False,
            settings=wandb.Settings(
                api_key=api_key,
                console="off",  # does not capture this process's output
                silent=True,
                init_timeout=INIT_TIMEOUT,
                finish_timeout=SHORT_TIMEOUT,
                finish_timeout_raises=True,
            ),
        )
        for axis, patterns in (
            ("step", ("train", "parameters", "gradients", "pictures")),
            ("epoch", ("epoch", "predictions")),
        ):
            self._run.define_metric(axis, hidden=True)
            for pattern in patterns:
                self._run.define_metric(f"{pattern}/*", step_metric=axis)
        # The summary of a continued run has the last value of each metric.
        self._reached = {axis: float(self._run.summary.get(axis) or 0) for axis in self._reached}
        self.url = self._run.url or ""
        files = self._run.settings.sync_dir
        how = "its files are kept when it ends"
        if not self.offline_url:
            self.hint = f". What it recorded is in {files}"
            how = f"to upload it: wandb sync {shlex.quote(files)}"
        line = self.url or mode
        if reason:
            line = f"{reason}, so the run is recorded offline; {how}"
        self.say(f"W&B: {line}")

    def _record_model(self, event: RunFinished) -> None:
        import wandb

        self._run.summary["model_state_url"] = redact_url(event.model_state_url)
        if not self.model_artifact:
            return
        # Beside W&B's own files of the run, because an offline run is uploaded long after this.
        local = Path(self._run.settings.sync_dir) / "model.pt"
        fetch_file(event.model_state_url, local, timeout=SHORT_TIMEOUT)
        metadata = {"step": event.step, "epoch": event.model_state_epoch, "best": event.best}
        name = re.sub(r"[^\w.-]", "-", self.model_artifact)
        artifact = wandb.Artifact(name, type="model", metadata=metadata)
        artifact.add_file(str(local), policy="immutable")  # does not copy it again
        self._run.log_artifact(artifact)


def _set_environment(directory: Path) -> None:
    """Keep W&B from outside services and from directories that it cannot write to."""
    # W&B reports its own failures to an outside service, and waits for it when the process exits.
    # It reads the variable each time, so the variable is not restored.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # where HOME is read-only, W&B would record nothing
    for variable, place in OWN_DIRECTORIES.items():
        if not os.access(os.path.expanduser(place), os.W_OK):
            os.environ.setdefault(variable, str(directory / variable.lower()))


def _media(value: float | str | Histogram | Sequence[Prediction]) -> Any:
    """Return a value in the form in which W&B shows it: a text keeps its line breaks."""
    import wandb

    if isinstance(value, str):
        return wandb.Html(f"<pre>{html.escape(value)}</pre>", inject=False)
    if isinstance(value, Histogram):
        return wandb.Histogram(np_histogram=(value.counts, value.edges))
    if isinstance(value, int | float):
        return value
    return _make_table(value)


def _make_table(predictions: Sequence[Prediction]) -> Any:
    """Return W&B's table of predictions."""
    import wandb

    classes = dict.fromkeys(name for each in predictions for name in each.scores)
    sample = "text"
    if any(each.image for each in predictions):
        sample = "image"
    scores = [f"score {name}" for name in classes]
    table = wandb.Table(["sample", sample, "guess", "truth", *scores])
    for each in predictions:
        shown: Any = None
        if each.image:
            shown = _picture(each.image)
        elif sample == "text":
            shown = each.text
        number = None
        if each.sample >= 0:
            number = each.sample
        table.add_data(number, shown, each.guess, each.truth, *map(each.scores.get, classes))
    return table


def _picture(png: bytes) -> Any:
    import wandb
    from PIL import Image

    return wandb.Image(Image.open(io.BytesIO(png)))
