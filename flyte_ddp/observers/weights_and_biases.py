"""The observer that shows a run in Weights & Biases.

It runs in the parent process, which has the API key; no rank ever sees it. Imports wandb when a run starts, which takes
1.5 s.

`flytekitplugins.wandb.wandb_init` is not used for three reasons. Outside a local run it requires a key, while `Wandb`
then records the run offline. An error in it fails the task. It takes the run's id from the attempt's host name, so
every retry starts another run, while `Wandb` continues the existing one.
"""

from __future__ import annotations

import html
import io
import logging
import math
import os
import queue
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from flyte_ddp.events import (
    CheckpointLoaded,
    Event,
    HistogramsTaken,
    LayerDescribed,
    PredictionsMade,
    RunFinished,
    RunStarted,
    plain,
)
from flyte_ddp.observers.wandb_log import is_complete
from flyte_ddp.storage import fetch_file, redact_url, redact_values, write_file

# Seconds for W&B, together less than the launcher waits for its listeners at the end.
INIT_TIMEOUT = 30.0
FINISH_TIMEOUT = 60.0  # for uploading what is left at the end
WRITE_TIMEOUT = 10.0  # for the rest of an offline run's log, after `finish`
CLOSE_TIMEOUT = INIT_TIMEOUT + FINISH_TIMEOUT + WRITE_TIMEOUT  # until this process continues without W&B

# W&B's own directories, by the variables that move them.
OWN_DIRECTORIES = {
    "WANDB_CACHE_DIR": "~/.cache/wandb",
    "WANDB_CONFIG_DIR": "~/.config/wandb",
    "WANDB_DATA_DIR": "~/.local/share/wandb",
}

# Fields of RunStarted that are not shown beside the configuration, or under another name.
NOT_IN_CONFIG = ("at", "name", "num_restarts", "config", "layers")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Wandb:
    """Shows a run in Weights & Biases. A failure of W&B never affects the training.

    W&B is only called in a thread of this listener, with bounded waits. An error there is printed once and ends the
    reporting to W&B. Without a key the run is recorded offline, and a line shows how to upload it. `WANDB_MODE` and
    W&B's other environment variables work as usual. The stop button on W&B's page interrupts this process like Ctrl-C.

    A resumed run continues the W&B run with the same `run_id` and logs what that run does not have yet. W&B's own step
    counter cannot go back as a resumed run's steps do, so the x axes are metrics of ours, "step" and "epoch".
    """

    project: str  # created if missing
    run_id: str  # the same in every attempt of one run; letters, digits, "-" and "_"
    directory: str | Path  # for W&B's files; created if missing
    _: KW_ONLY
    name: str | None = None  # of the run on W&B's pages
    group: str | None = None  # of runs that belong together, such as a sweep
    notes: str | None = None  # shown with the run, such as the URL of the Flyte execution
    # None is that of WANDB_API_KEY or `wandb login`. It appears in no file and no message.
    api_key: str | None = field(default=None, repr=False)
    model_artifact: str = ""  # the name of an artifact with the model state, uploaded at the end; "" for none
    config: Mapping[str, Any] = field(default_factory=dict)  # shown besides the run's own configuration
    # Of a directory to which an offline run is copied at the end, as one archive. Set it if `directory` is lost with
    # the process, as in a pod; "" leaves the run in `directory`.
    offline_url: str = ""
    say: Callable[[str], None] = logger.warning  # prints a line for people
    is_failure: Callable[[BaseException], bool] = lambda error: True  # whether an error that ends the run is one of it

    label = "W&B run"

    def __post_init__(self) -> None:
        self.url = ""  # of the run's page, when W&B has answered; "" offline
        self._directory = Path(self.directory).absolute()
        self._wandb: Any = None  # the module
        self._run: Any = None  # W&B's
        self._is_offline = False
        self._last_step = 0  # what the W&B run has
        self._last_epoch = 0.0  # likewise
        self._repeated_step = 0  # of ranks that have started again: up to here their reports are known
        self._has_epochs = False  # the files of an earlier attempt have its epochs
        self._epoch_is_new = False
        self._is_off = False
        self._queue: queue.SimpleQueue[Event | int] = queue.SimpleQueue()  # an int is the exit code, the last item
        self._thread = threading.Thread(target=self._work, name="wandb-listener", daemon=True)

    def handle(self, event: Event) -> None:
        if self._is_off:
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put(event)

    def close(self, error: BaseException | None) -> None:
        """Finish the W&B run, as failed if there is a failure. Wait at most CLOSE_TIMEOUT for uploads."""
        if not self._thread.is_alive():
            return
        self._queue.put(int(error is not None and self.is_failure(error)))
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            self._give_up(TimeoutError(f"it did not finish within {CLOSE_TIMEOUT:.0f} s"))

    def _work(self) -> None:
        exit_code = 1
        try:
            while not isinstance(item := self._queue.get(), int):
                self._report(item)
            exit_code = item
        except Exception as error:  # of any kind: no failure of W&B may end the training
            self._give_up(error)
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
                if self._is_offline and self.offline_url:
                    self._keep_offline_run()
            except Exception as error:
                self._give_up(error)

    def _keep_offline_run(self) -> None:
        """Copy the files of an offline run to `offline_url` and print how to upload them to W&B."""
        files = Path(self._run.settings.sync_dir)
        deadline = time.monotonic() + WRITE_TIMEOUT
        while not all(is_complete(log) for log in files.glob("*.wandb")):
            if time.monotonic() > deadline:
                self.say(f"W&B: {files.name} had no end after {WRITE_TIMEOUT:.0f} s, so the last of it may be lost")
                break
            time.sleep(0.1)
        with tempfile.TemporaryDirectory() as directory:
            archive = shutil.make_archive(f"{directory}/{files.name}", "zip", files.parent, files.name)
            url = f"{self.offline_url.rstrip('/')}/{files.name}.zip"
            write_file(url, Path(archive).read_bytes(), timeout=FINISH_TIMEOUT)
        command = f"wandb sync {files.name}"
        self.say(f"W&B: the offline run is kept at {redact_url(url)}; to upload it, download, unzip, then: {command}")

    def _give_up(self, error: Exception) -> None:
        if self._is_off:
            return
        self._is_off = True
        message = redact_url(f"{type(error).__name__}: {error}")
        for key in (self.api_key, os.environ.get("WANDB_API_KEY")):
            if key:
                message = message.replace(key, "***")
        kept = ""
        if self._run is not None and not self.offline_url:
            kept = f". What it recorded is in {self._run.settings.sync_dir}"
        self.say(f"W&B failed and records no more of this run; the training continues: {message}{kept}")

    def _report(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        if self._run is None:
            return
        if isinstance(event, CheckpointLoaded):
            if self._has_epochs:
                self._last_epoch, self._has_epochs = len(event.epochs), False
            for epoch in event.epochs:
                self._report_figures(epoch)
        self._report_figures(event)
        if isinstance(event, HistogramsTaken) and self._epoch_is_new:
            self._report_histograms(event)
        elif isinstance(event, PredictionsMade):
            self._report_predictions(event)
        elif isinstance(event, RunFinished) and event.model_state_url:
            self._report_model(event)

    def _start(self, event: RunStarted) -> None:
        if self._run is None:
            self._open()
        self._repeated_step = self._last_step
        if self._run is None:
            return
        values = {name: value for name, value in vars(event).items() if value and name not in NOT_IN_CONFIG}
        values = {"program": event.name, **values}
        config = plain(redact_values({**self.config, **event.config, **values}))
        self._run.config.update(config, allow_val_change=True)
        if event.layers and "graph_0" not in self._run.summary.keys():  # noqa: SIM118 - no mapping, though it looks like one
            self._run.summary["graph_0"] = self._graph(event.layers)

    def _report_figures(self, event: Event) -> None:
        """Log the figures of the event on their x axis, or as part of the run's summary."""
        figures = event.figures()
        if figures.axis == "step" and figures.step is not None and figures.step > self._repeated_step:
            self._last_step = max(self._last_step, figures.step)
            epoch = {} if figures.epoch is None else {"train/epoch": figures.epoch}
            values = {f"train/{name}": value for name, value in figures.values.items()}
            self._run.log({"step": figures.step, **epoch, **values})
        elif figures.axis == "epoch" and figures.epoch is not None:
            self._epoch_is_new = figures.epoch > self._last_epoch
            if self._epoch_is_new:
                self._last_epoch = figures.epoch
                values = {f"epoch/{name}": value for name, value in figures.values.items()}
                if sample := getattr(event, "sample", ""):  # W&B shows it as it is, line breaks included
                    values["epoch/sample"] = self._wandb.Html(f"<pre>{html.escape(sample)}</pre>", inject=False)
                self._run.log({"epoch": figures.epoch, **values})
        elif not figures.axis and figures.values:
            self._run.summary.update(figures.values)

    def _open(self) -> None:
        """Open the W&B run, or continue it. Do nothing if W&B is disabled."""
        if os.environ.get("WANDB_MODE") == "disabled":  # saves the import, 1.5 s
            return
        # W&B reports its own failures to an outside service, and waits for it when the process exits. It reads the
        # variable each time, so the variable is not restored.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        for variable, place in OWN_DIRECTORIES.items():  # where HOME is read-only, W&B would record nothing
            try:
                os.makedirs(os.path.expanduser(place), exist_ok=True)
                is_writable = os.access(os.path.expanduser(place), os.W_OK)
            except OSError:
                is_writable = False
            if not is_writable:
                os.environ.setdefault(variable, str(self._directory / variable.lower()))
        import wandb

        self._wandb = wandb
        session = wandb.setup(wandb.Settings(silent=True))  # its own output would damage the progress bar
        mode: Any = os.environ.get("WANDB_MODE") or session.settings.mode
        if mode == "disabled":
            return
        reason = f"WANDB_MODE is {mode}" if mode in ("offline", "dryrun") else ""
        if not reason and not self.api_key and not wandb.login(prompt=False, verify=False):
            reason = "no API key was found"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            id=self.run_id,
            name=self.name,
            group=self.group,
            notes=self.notes,
            dir=str(self._directory),
            mode="offline" if reason else mode,
            resume="allow",
            reinit="create_new",  # does not touch a run of the user's own, and allows several of ours
            save_code=False,
            settings=wandb.Settings(
                api_key=self.api_key,
                console="off",  # does not capture this process's output
                silent=True,
                init_timeout=INIT_TIMEOUT,
                finish_timeout=FINISH_TIMEOUT,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("epoch", hidden=True)
        for pattern in ("train/*", "parameters/*", "gradients/*"):
            self._run.define_metric(pattern, step_metric="step")
        for pattern in ("epoch/*", "predictions/*"):
            self._run.define_metric(pattern, step_metric="epoch")
        # The summary of a continued run has the last value of each metric.
        self._last_step = int(self._run.summary.get("step") or 0)
        self._last_epoch = float(self._run.summary.get("epoch") or 0)
        files = Path(self._run.settings.sync_dir)
        self._has_epochs = bool(reason) and len(list(files.parent.glob(f"offline-run-*-{self._run.id}"))) > 1
        self.url = self._run.url or ""
        self._is_offline = bool(reason)
        if not reason:
            self.say(f"W&B: {self.url}")
        elif self.offline_url:
            self.say(f"W&B: {reason}, so the run is recorded offline; its files are kept when it ends")
        else:
            command = f"wandb sync {shlex.quote(str(files))}"
            self.say(f"W&B: {reason}, so the run is recorded offline; to upload it: {command}")

    def _report_histograms(self, event: HistogramsTaken) -> None:
        row: dict[str, Any] = {"step": event.step}
        for kind, histograms in (("parameters", event.parameters), ("gradients", event.gradients)):
            for name, histogram in histograms.items():
                if not histogram.counts or not all(map(math.isfinite, histogram.edges)):
                    continue  # NaN or infinite values have no histogram, and W&B would raise
                row[f"{kind}/{name}"] = self._wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._run.log(row)

    def _report_predictions(self, event: PredictionsMade) -> None:
        if int(self._run.summary.get("predictions/epoch") or 0) >= event.epoch:
            return
        from PIL import Image

        classes = list(dict.fromkeys(name for prediction in event.predictions for name in prediction.scores))
        has_images = any(prediction.image for prediction in event.predictions)
        columns = ["image" if has_images else "text", "guess", "truth", *(f"score {name}" for name in classes)]
        rows = []
        for prediction in event.predictions:
            sample: Any = prediction.text
            if has_images:
                sample = self._wandb.Image(Image.open(io.BytesIO(prediction.image))) if prediction.image else None
            scores = [prediction.scores.get(name) for name in classes]
            rows.append([sample, prediction.guess, prediction.truth, *scores])
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"epoch": event.epoch, "predictions/epoch": event.epoch, "predictions/test": table})

    def _report_model(self, event: RunFinished) -> None:
        self._run.summary["model_state_url"] = redact_url(event.model_state_url)
        if not self.model_artifact:
            return
        # Beside W&B's own files of the run, because an offline run is uploaded long after this.
        local = Path(self._run.settings.sync_dir) / "model.pt"
        fetch_file(event.model_state_url, local, timeout=FINISH_TIMEOUT)
        metadata = {"step": event.step, "epoch": event.model_state_epoch, "best": event.best}
        name = re.sub(r"[^\w.-]", "-", self.model_artifact)
        artifact = self._wandb.Artifact(name, type="model", metadata=metadata)
        artifact.add_file(str(local), policy="immutable")  # does not copy it again
        self._run.log_artifact(artifact)

    def _graph(self, layers: Sequence[LayerDescribed]) -> Any:
        """Return the model's layers in the form that `wandb.watch(log_graph=True)` records: nodes without edges."""
        graph = self._wandb.Graph("torch")
        for index, layer in enumerate(layers):
            graph.add_node(
                id=index,
                name=layer.name,
                class_name=layer.kind,
                output_shape=layer.output_shape,
                num_parameters=[layer.num_parameters],
            )
        return graph
