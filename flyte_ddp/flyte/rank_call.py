"""The call of a Flyte task's function in a rank: from the task's inputs to its outputs, as
literals.

Inputs and outputs cross machines as Flyte's own literals (protobuf), not as pickled values. So a
FlyteFile is a URL that each rank downloads on its own machine. No credentials of the driver's file
system travel with it, and a worker's message is never executed. Rank 0 converts its return values
itself, because its files are on its machine: flytekit uploads them from there to the task's own
prefix.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
from dataclasses import dataclass

import cloudpickle  # type: ignore[import-untyped]
from flyteidl.core import literals_pb2
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.literals import LiteralMap
from flytekit.utils.asyn import loop_manager

from flyte_ddp.flyte.deck import render_decks
from flyte_ddp.storage import flyte_storage_environment


@dataclass(frozen=True)
class TaskCall:
    """A call of a task's function, to be made in every rank."""

    module: str  # module from which ranks import the task; "" if they cannot import it
    attribute: str  # name of the task in its module
    task: bytes  # the pickled task; b"" if ranks can import it
    inputs: bytes  # the task's inputs, a LiteralMap
    raw_output_prefix: str  # URL of the execution for outputs
    output_metadata_prefix: str  # URL of the execution for metadata
    checkpoints: tuple[str | None, str | None]  # Flyte's own paths: this attempt's, previous one's

    def __call__(self) -> bytes:
        os.environ.update(flyte_storage_environment())
        with setup_execution(
            self.raw_output_prefix, self.output_metadata_prefix, *self.checkpoints
        ) as context:
            if self.module:
                task = getattr(importlib.import_module(self.module), self.attribute)
            else:
                task = cloudpickle.loads(self.task)
            inputs = TypeEngine.literal_map_to_kwargs(
                context, parse_literals(self.inputs), task.python_interface.inputs
            )
            try:
                value = task.task_function(**inputs)
            except FlyteRecoverableException as error:
                raise _Recoverable(error).with_traceback(error.__traceback__) from None
            if int(os.environ["RANK"]) > 0:
                return b""
            outputs, values = loop_manager.run_sync(task._output_to_literal_map, value, context)
            message = base64.b64encode(outputs.to_flyte_idl().SerializeToString()).decode()
            decks = render_decks(task, inputs, values, context)
            return json.dumps({"outputs": message, "decks": decks}).encode()


def parse_literals(message: bytes) -> LiteralMap:
    return LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(message))


def unpack(value: bytes) -> tuple[LiteralMap, list[tuple[str, str]]]:
    """Return the outputs and the Decks (name and HTML) from the return value of `TaskCall`."""
    values = json.loads(value)
    return parse_literals(base64.b64decode(values["outputs"])), [
        (name, html) for name, html in values["decks"]
    ]


class _Recoverable(Exception):
    """A user's FlyteRecoverableException, or a subclass, in the form that leaves the rank: name of
    the class, and text.
    """

    def __init__(self, error: FlyteRecoverableException) -> None:
        name = type(error).__name__
        text = ",".join(map(str, error.args))
        if name != self.__class__.__name__:
            text = f"{name}: {text}"
        super().__init__(text)


_Recoverable.__name__ = FlyteRecoverableException.__name__
