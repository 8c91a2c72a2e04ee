"""Start runs of the recipes for tests and keep their events and output.

As a program, `python -m tests.support.runs JSON`, it is the parent of a run, for tests that send
signals to it: it prints every event as a line of JSON, and last how the run ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp import events
from flyte_ddp.config import TrainingConfig
from flyte_ddp.launch.agent import supervisor
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage.state_dict_file import save_safetensors
from tests.support.events import to_dict

REPOSITORY = Path(__file__).parents[2]


def flip(file):
    """Change one bit in the middle of a file."""
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


@dataclass
class Run:
    """A run below `directory`: its data, its checkpoints, and the events and lines of its ranks."""

    directory: Path
    recipe: str
    events: list[events.Event] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: BaseException | None = None  # the error that the listeners get
    result: events.RunState | None = None
    job: Job | None = None
    config: TrainingConfig | None = None
    url: str = ""  # place of the checkpoints, if they are not below `directory`

    @property
    def checkpoints(self):
        return self.directory / "checkpoints"

    @property
    def started(self):
        return next(event for event in self.events if isinstance(event, events.RunStarted))

    @property
    def loaded(self):
        return next(event for event in self.events if isinstance(event, events.CheckpointLoaded))

    @property
    def last_step(self):
        return max(
            (event.step for event in self.events if isinstance(event, events.Reported)), default=0
        )

    def data(self, source=""):
        """The directory of the prepared data."""
        directory = self.directory / f"data{source}"
        if not directory.exists():
            directory.mkdir(parents=True)
            options = self.config.recipe_options if self.config else {}
            prepare_data(get_recipe(self.recipe, options), source, directory)
        return directory

    def handle(self, event):
        self.events.append(event)

    def close(self, error):
        self.error = error

    def relay(self, line):
        self.lines.append(line)

    def train(
        self,
        num_processes=2,
        source="",
        checkpoints="",
        data=None,
        max_restarts=0,
        **config,
    ):
        """Train to the end, or to the error, which is raised; `config` are fields that differ from
        the recipe's.
        """
        self.config = config_of(self.recipe, config)
        program = recipe_program(self.recipe, self.config)
        self.job = Job(program, checkpoints or str(self.checkpoints), time.time())
        place = LocalPlace(num_processes, max_restarts)
        self.result = driver.run(
            self.job, place, data or (lambda: str(self.data(source))), [self], self.relay
        )
        return self

    def state(self):
        """The state dict of the finished run."""
        import torch

        return torch.load(self.result.finished.model_state_url, weights_only=True)


def new_run(directory, recipe="Tiny"):
    """A run of one of the recipes for tests, or of the recipe with the given dotted name."""
    return Run(Path(directory), recipe if "." in recipe else f"tests.support.recipes.{recipe}")


def start_parent(directory, recipe="Tiny", **arguments):
    """The process of a parent that calls `Run.train` with `arguments`, alone in a process group as
    under a shell.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.runs",
            json.dumps([str(directory), recipe, arguments]),
        ],
        cwd=REPOSITORY,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_hangups,
    )


def hear_hangups():
    """Do not ignore SIGHUP, as the tests themselves do under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_for_step(parent, step):
    """Read what `parent` prints until its run has reached `step`."""
    for line in parent.stdout:
        values = json.loads(line) if line.startswith("{") else {}
        if values.get("event") == "Reported" and values["step"] >= step:
            return
    raise AssertionError(f"the run ended before step {step}")


def how_it_ended(parent):
    """The name and the message of the error with which the run of `parent` ended; ("", "") where
    there was none.
    """
    output, _ = parent.communicate()
    return tuple(json.loads(output.splitlines()[-1])["ended"])


def print_json(values):
    """Print one line whole: `print` writes its end apart, where another thread may write first."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class _Printer(Run):
    def handle(self, event):
        super().handle(event)
        values = to_dict(event)
        if values["event"] != "PredictionsMade":  # This event holds bytes.
            print_json(values)


def _main():
    directory, recipe, arguments = json.loads(sys.argv[1])
    run = _Printer(Path(directory), new_run(directory, recipe).recipe)
    ended = ("", "")
    try:
        run.train(**arguments)
    except Exception as error:
        ended = (type(error).__name__, str(error))
    print_json({"ended": ended})


if __name__ == "__main__":
    _main()


def to_safetensors(state):
    """Return the contents of a state dict's safetensors file."""
    with tempfile.NamedTemporaryFile() as file:
        save_safetensors(state, file.name)
        return Path(file.name).read_bytes()


def fork_functions(monkeypatch):
    """Fork ranks of functions too from a process that has torch, which is faster."""
    start_rank = supervisor.start_rank

    def start(program, *arguments):
        return start_rank(dataclasses.replace(program, slow_imports=("torch",)), *arguments)

    monkeypatch.setattr(supervisor, "start_rank", start)
