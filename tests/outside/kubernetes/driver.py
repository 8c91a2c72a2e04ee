"""The driver of training runs, in a pod, as a Flyte task would be. Needs no pytest: the image has
none.

As a program, `python -m tests.outside.kubernetes.driver JSON`, it opens one cluster and trains run
after run on it, up to the first that fails. Events and log lines of the runs and the launcher are
printed as lines of JSON, each with its time.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flyte_ddp import events
from flyte_ddp.cluster.config import cluster_config
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config import resolve
from flyte_ddp.launch.control import costs, driver
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes import get_recipe
from tests.support.events import to_dict
from tests.support.runs import new_run

# the launcher's log and the listeners' events come from different threads
_speaks = threading.Lock()


def say(**values: Any) -> None:
    with _speaks:
        # a value of a function is bytes
        print(json.dumps({"at": time.time(), **values}, default=repr), flush=True)


class Listener:
    def __init__(self, run: str) -> None:
        self.run = run

    def handle(self, event: events.Event, state: events.RunState) -> None:
        # bytes, and kilobytes of numbers
        if not isinstance(event, (events.PredictionsMade, events.HistogramsTaken)):
            say(run=self.run, **to_dict(event))
        if isinstance(event, events.RunFinished):
            say(run=self.run, cost=state.cost())

    def close(self, error: BaseException | None) -> None:
        say(
            run=self.run,
            ended="well" if error is None else type(error).__name__,
            message=str(error or ""),
        )


class LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage())


def prepared(directory: str, recipe: str) -> str:
    return str(new_run(directory, recipe).data())


def main() -> None:
    """Train as the argument describes: `settings` (text of a settings.toml in the working
    directory; "" for none), `cluster` (fields of ClusterConfig), and `runs`, each with
    its `name`, `recipe`, `checkpoints` (URL) and `config` (fields of TrainingConfig).
    """
    logging.getLogger("flyte_ddp").addHandler(LogHandler())
    logging.getLogger("flyte_ddp").setLevel(logging.INFO)
    arguments = json.loads(sys.argv[1])
    # a node of every pod costs 1 a second
    costs.read_settings = lambda: {"prices": {"kubernetes.io/hostname=*": 3600.0}}
    if arguments["settings"]:
        Path("settings.toml").write_text(arguments["settings"])
    cluster, run_name = cluster_config(arguments["cluster"]), socket.gethostname()
    with tempfile.TemporaryDirectory() as directory, open_cluster(cluster, run_name) as client:
        for each in arguments["runs"]:
            data = functools.partial(prepared, f"{directory}/{each['name']}", each["recipe"])
            config = resolve(get_recipe(each["recipe"]).defaults, each["config"])
            program = recipe_program(each["recipe"], config)
            driver.run(
                Job(program, each["checkpoints"], time.time()),
                DaskPlace(client, cluster, run_name),
                data=data,
                listeners=[Listener(each["name"])],
                relay=lambda line: say(line=line),
            )
    say(cluster="gone")


if __name__ == "__main__":
    main()
