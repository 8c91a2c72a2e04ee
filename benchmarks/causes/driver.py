"""The driver's process: `python -m benchmarks.causes.driver SCHEDULER`.

It takes a run as a line of JSON and prints what the product says about it, one line of JSON each.
It knows nothing of faults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import sys
import time
from typing import Any

import cloudpickle

from benchmarks.causes.program import train_function
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config import resolve
from flyte_ddp.config.training import Needs
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes import get_recipe

RECIPE = "benchmarks.causes.program.Faulty"


class Printer(logging.Handler):
    """Prints events, lines of ranks, and the product's own warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def print(self, **values: Any) -> None:
        self.file.write(json.dumps(values, default=str) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.print(log=record.getMessage())

    def handle_event(self, event: Any) -> None:
        values = dataclasses.asdict(event)
        nodes = [str(each) for each in getattr(event, "nodes", [])]
        self.print(event=type(event).__name__, **values, text=str(event), names=nodes)


class Listener:
    def __init__(self, printer: Printer) -> None:
        self.printer = printer

    def handle(self, event: Any) -> None:
        self.printer.handle_event(event)

    def close(self, error: BaseException | None) -> None:
        """Nothing is left to do."""


def make_program(run: dict[str, Any]) -> Program:
    if run["program"] == "recipe":
        return recipe_program(RECIPE, resolve(get_recipe(RECIPE).defaults, run["config"]))
    call = cloudpickle.dumps(
        functools.partial(train_function, run["program"], run["config"]["epochs"])
    )
    needs = Needs(run["config"]["stall_timeout"], run["config"]["store_timeout"])
    return Program(
        run["program"], call, ("benchmarks",), slow_imports=("torch",), needs=needs, left_timeout=2
    )


def main() -> None:
    printer = Printer()
    logging.getLogger("flyte_ddp").addHandler(printer)
    cluster = ClusterConfig(
        kind="existing",
        scheduler_address=sys.argv[1],
        num_nodes=2,
        min_nodes=1,
        return_timeout=3.0,
        grow_delay=300.0,
        node_timeout=30.0,
        check_nodes="always",
    )
    with open_cluster(cluster, "causes") as client:
        printer.print(ready=True)
        for line in sys.stdin:
            run = json.loads(line)
            chosen = dataclasses.replace(cluster, num_nodes=run["num_nodes"])
            job = Job(make_program(run), run["place"], time.time())
            error = ("", "")
            try:
                driver.run(
                    job,
                    DaskPlace(client, chosen),
                    lambda run=run: run["data"],
                    [Listener(printer)],
                    lambda text: printer.print(line=text),
                )
            except Exception as raised:
                error = (type(raised).__name__, str(raised))
            printer.print(ended=error)


if __name__ == "__main__":
    main()
