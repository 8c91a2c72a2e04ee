"""The observer that shows a run in Weights & Biases.

It runs in the parent process, which has the API key; no rank ever sees it. Imports wandb when a run starts, which takes
1.5 s.

`flytekitplugins.wandb.wandb_init` is not used for three reasons. Outside a local run it requires a key, while `Wandb`
then records the run offline. An error in it fails the task. It takes the run's id from the attempt's host name, so
every retry starts another run, while `Wandb` continues the existing one.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec

from flyte_ddp.events import (
    EpochFinished,
    Event,
    HistogramsTaken,
    LayerDescribed,
    PredictionsMade,
    RunFinished,
    RunStarted,
    StepFinished,
)

# Seconds that W&B gets, together less than the launcher's listeners get to finish in.
INIT_TIMEOUT = 30.0
FINISH_TIMEOUT = 60.0  # for uploading what is left at the end
CLOSE_TIMEOUT = INIT_TIMEOUT + FINISH_TIMEOUT + 10.0  # until this process goes on without it, whatever it does

# Fields of RunStarted, beside the configuration.
SHOWN_IN_CONFIG = (
    "recipe",
    "data",
    "world_size",
    "device",
    "backend",
    "num_threads",
    "num_parameters",
    "num_train_samples",
    "num_test_samples",
    "num_steps",
    "versions",
)

logger = logging.getLogger(__name__)


class Wandb:
    """Shows the run in Weights & Biases, without ever standing in its way.

    W&B is called in a thread of this listener's own only, with bounded waits. What goes wrong there is said once and
    ends the reporting to W&B, not the training. Without a key the run is recorded offline, and it is said how to upload
    it. `WANDB_MODE` and W&B's other environment variables work as anywhere. The stop button of W&B's page interrupts
    this process like Ctrl-C.

    A resumed run continues the W&B run of the same `run_id` and logs what that does not have yet. W&B's own step
    counter refuses to go back, as a resumed run's steps do; so the x axes are metrics of ours, "step" and "epoch".

    Args:
        project: of W&B, created where missing.
        run_id: the same in every attempt of one run; letters, digits, "-" and "_".
        directory: for W&B's files; created where missing.
        entity: the user or team that the project belongs to; the key's default where None.
        name: of the run on W&B's pages.
        group: of runs that belong together, such as a sweep.
        tags: to find the run by.
        notes: shown with the run, such as the URL of the Flyte execution.
        api_key: where None, that of WANDB_API_KEY or `wandb login` is used. It appears in no file and no message.
        model_artifact: upload the model state as an artifact of this name when the run finished; "" does not.
        config: to show besides the run's own.
        say: prints a line for people; by default as a warning of this module's logger.
    """

    def __init__(
        self,
        project: str,
        run_id: str,
        directory: str | Path,
        *,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        api_key: str | None = None,
        model_artifact: str = "",
        config: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self._identity: dict[str, Any] = {
            "project": project,
            "id": run_id,
            "entity": entity,
            "name": name,
            "group": group,
            "tags": list(tags),
            "notes": notes,
        }
        self._directory = Path(directory).absolute()
        self._api_key = api_key
        self._model_artifact = model_artifact
        self._config = dict(config or {})
        self._say = say
        self._url = ""
        self._run: Any = None  # W&B's
        self._recipe = ""
        self._last_step = self._last_epoch = 0  # what the W&B run has
        self._epoch_is_new = False
        self._is_off = False
        self._queue: queue.SimpleQueue[Event | int] = queue.SimpleQueue()  # an int is the exit code, and the end
        self._thread = threading.Thread(target=self._work, name="wandb-listener", daemon=True)

    @property
    def url(self) -> str:
        """The run's page; "" while W&B has not answered yet, and offline."""
        return self._url

    def handle(self, event: Event) -> None:
        """Pass the event on to W&B, later and elsewhere."""
        if self._is_off:
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put(event)

    def close(self, error: BaseException | None) -> None:
        """Finish the W&B run, as failed if there is an error. Waits for uploads, for CLOSE_TIMEOUT at most."""
        if not self._thread.is_alive():
            return
        self._queue.put(0 if error is None else 1)
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            self._give_up(TimeoutError(f"it did not finish within {CLOSE_TIMEOUT:.0f} s"))

    def _work(self) -> None:
        exit_code = 1
        try:
            while not isinstance(item := self._queue.get(), int):
                self._report(item)
            exit_code = item
        except Exception as error:  # of any kind: none of them is worth the training
            self._give_up(error)
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._is_off:
            return
        self._is_off = True
        message = f"{type(error).__name__}: {error}"
        for key in (self._api_key, os.environ.get("WANDB_API_KEY")):
            if key:
                message = message.replace(key, "***")
        kept = f"; what it has is in {self._run.settings.sync_dir}" if self._run is not None else ""
        self._say(f"W&B failed and is told nothing more of this run, which goes on: {message}{kept}")

    def _report(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif self._run is None:
            return
        elif isinstance(event, StepFinished) and event.step > self._last_step:
            self._last_step = event.step
            self._run.log(
                {
                    "step": event.step,
                    "train/epoch": event.epoch,
                    "train/loss": event.loss,
                    "train/learning_rate": event.learning_rate,
                    "train/gradient_norm": event.gradient_norm,
                    "train/samples_per_second": event.samples_per_second,
                }
            )
        elif isinstance(event, EpochFinished):
            self._report_epoch(event)
        elif isinstance(event, HistogramsTaken) and self._epoch_is_new:
            self._report_histograms(event)
        elif isinstance(event, PredictionsMade):
            self._report_predictions(event)
        elif isinstance(event, RunFinished):
            self._report_end(event)

    def _start(self, event: RunStarted) -> None:
        if self._run is None:
            self._open(event)
        if self._run is None:
            return
        self._recipe = event.recipe
        values = {name: getattr(event, name) for name in SHOWN_IN_CONFIG}
        self._run.config.update({**self._config, **event.config, **values}, allow_val_change=True)
        if event.layers and "graph_0" not in self._run.summary.keys():  # noqa: SIM118 - no mapping, though it looks like one
            self._run.summary["graph_0"] = _graph(event.layers)
        for epoch in event.previous_epochs:
            self._report_epoch(epoch)

    def _open(self, event: RunStarted) -> None:
        """Open the W&B run, or continue it; leave none where W&B is disabled."""
        if os.environ.get("WANDB_MODE") == "disabled":  # spares the import, 1.5 s
            return
        # W&B reports its own failures to a service elsewhere, and waits for that at the process's end. It looks at the
        # variable whenever it does, so the variable stays.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        session = wandb.setup(wandb.Settings(silent=True))  # what it prints itself would tear the progress bar
        mode: Any = os.environ.get("WANDB_MODE") or session.settings.mode
        if mode == "disabled":
            return
        reason = "" if mode not in ("offline", "dryrun") else f"WANDB_MODE is {mode}"
        if not reason and not self._api_key and not wandb.login(prompt=False, verify=False):
            reason = "there is no API key"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            **self._identity,
            dir=str(self._directory),
            mode="offline" if reason else mode,
            resume="allow",
            reinit="create_new",  # leaves a run of the user's own alone, and allows several of ours
            save_code=False,
            settings=wandb.Settings(
                api_key=self._api_key,
                console="off",  # does not take over this process's output
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
        # A continued run brings its summary along, which holds the last value of each metric.
        self._last_step = int(self._run.summary.get("step") or 0)
        self._last_epoch = int(self._run.summary.get("epoch") or 0)
        files = Path(self._run.settings.sync_dir)
        if reason and len(list(files.parent.glob(f"offline-run-*-{self._run.id}"))) > 1:
            self._last_epoch = len(event.previous_epochs)  # they are among the files of an earlier attempt
        self._url = self._run.url or ""
        if reason:
            self._say(f"W&B: {reason}, so the run is kept offline; to upload it: wandb sync {shlex.quote(str(files))}")
        else:
            self._say(f"W&B: {self._url}")

    def _report_epoch(self, event: EpochFinished) -> None:
        self._epoch_is_new = event.epoch > self._last_epoch
        if not self._epoch_is_new:
            return
        self._last_epoch = event.epoch
        self._run.log(
            {
                "epoch": event.epoch,
                "epoch/train_loss": event.train_loss,
                "epoch/test_loss": event.test_loss,
                "epoch/accuracy": event.accuracy,
                "epoch/seconds": event.seconds,
                "epoch/samples_per_second": event.samples_per_second,
                **({"epoch/num_replaced": event.num_replaced} if event.num_replaced else {}),
            }
        )

    def _report_histograms(self, event: HistogramsTaken) -> None:
        import wandb

        row: dict[str, Any] = {"step": event.step}
        for kind, histograms in (("parameters", event.parameters), ("gradients", event.gradients)):
            for name, histogram in histograms.items():
                row[f"{kind}/{name}"] = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._run.log(row)

    def _report_predictions(self, event: PredictionsMade) -> None:
        if int(self._run.summary.get("predictions/epoch") or 0) >= event.epoch:
            return
        import io

        import wandb
        from PIL import Image

        classes = list(dict.fromkeys(name for prediction in event.predictions for name in prediction.scores))
        has_images = any(prediction.image for prediction in event.predictions)
        columns = ["image" if has_images else "text", "guess", "truth", *(f"score {name}" for name in classes)]
        rows = []
        for prediction in event.predictions:
            sample: Any = prediction.text
            if has_images:
                sample = wandb.Image(Image.open(io.BytesIO(prediction.image))) if prediction.image else None
            scores = [prediction.scores.get(name) for name in classes]
            rows.append([sample, prediction.guess, prediction.truth, *scores])
        table = wandb.Table(columns=columns, data=rows)
        self._run.log({"epoch": event.epoch, "predictions/epoch": event.epoch, "predictions/test": table})

    def _report_end(self, event: RunFinished) -> None:
        self._run.summary.update(
            {
                "best_epoch": event.best_epoch,
                "best_accuracy": event.best_accuracy,
                "seconds": event.seconds,
                "first_step_seconds": event.first_step_seconds,
                "peak_memory_bytes": event.peak_memory_bytes,
                "model_state_url": event.model_state_url,
            }
        )
        if not self._model_artifact:
            return
        import wandb

        # Beside W&B's own files of the run: an offline run's is read when it is uploaded, long after this.
        local = Path(self._run.settings.sync_dir) / "model.pt"
        with fsspec.open(event.model_state_url, "rb") as source, open(local, "wb") as target:
            shutil.copyfileobj(source, target)
        metadata = {"step": event.step, "best_epoch": event.best_epoch, "best_accuracy": event.best_accuracy}
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", self._model_artifact), type="model", metadata=metadata)
        artifact.add_file(str(local), policy="immutable")  # does not copy it again
        self._run.log_artifact(artifact)


def _graph(layers: Sequence[LayerDescribed]) -> Any:
    """The model's topology in the form in which `wandb.watch(log_graph=True)` records it: nodes, and no edges."""
    import wandb

    graph = wandb.Graph("torch")
    for index, layer in enumerate(layers):
        graph.add_node(
            id=index,
            name=layer.name,
            class_name=layer.kind,
            output_shape=layer.output_shape,
            num_parameters=[layer.num_parameters],
        )
    return graph
