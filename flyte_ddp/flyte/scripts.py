"""Run a script of the user's own in a task, and take the script as a Flyte input.

The user gives a script, or a directory with a script. The whole directory is shipped: pyflyte packs
it into one archive when it converts the input, so a local run and a remote run ship the same files.
"""

from __future__ import annotations

import os
import typing
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.code.source_code import MAX_SIZE, files_below
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.failures import InputError
from flyte_ddp.flyte.inputs import ClusterInput, OptionalCluster, OptionalTransformer, location
from flyte_ddp.flyte.outputs import output_file, output_report, say_outputs
from flyte_ddp.flyte.task import check_cluster, check_urls, open_task_run, task_body
from flyte_ddp.launch.run import Gang, script_program
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.task_run.files import HISTORY

ScriptSource = typing.Union[FlyteFile, FlyteDirectory]  # noqa: UP007 - a script, or a directory or archive with one


class ScriptOutputs(NamedTuple):
    outputs: FlyteDirectory  # files that rank 0's node has written to {outputs}
    log: FlyteFile  # every line that the ranks printed
    history: FlyteFile  # every event of the run, as JSON lines
    report: FlyteFile  # the HTML page that the Deck shows too


@task_body
def run_script(
    script: ScriptSource,
    entry_point: str = "",
    arguments: Sequence[str] = (),
    cluster: OptionalCluster = None,
    checkpoints: str = "",
    output: str = "",
) -> ScriptOutputs:
    """Run a script in every rank of a new Dask cluster, which is deleted afterwards.

    The task is the driver: it needs no GPU, and the ranks run in the cluster's worker pods.
    `output` is the directory for the outputs of a local run; by default runs/NAME.
    """
    name = Path(entry_point or location(script)).stem
    report = Report(name)
    with open_task_run(report, name, checkpoints, output) as run:
        config = cluster or ClusterInput()
        check_urls(script=location(script))
        file = unpack_script(script, entry_point, run.files.directory / "script")
        directory = run.files.for_outputs / "outputs"
        directory.mkdir(exist_ok=True)
        outputs = run.files.url("outputs") or str(directory)
        program = script_program(str(file), list(arguments), outputs=outputs)
        check_cluster(config)
        gang = Gang(config.num_nodes, cluster=config)
        with open(run.files.directory / "log.txt", "w", encoding="utf-8") as log:

            def relay(line: str) -> None:
                log.write(f"{line}\n")
                run.say(line)
                report.add_line(line)

            run.run(program, gang, labels={"script": name}, relay=relay)
        report.outputs["outputs"] = outputs
        made = ScriptOutputs(
            outputs=FlyteDirectory(outputs, remote_directory=False),
            log=output_file(run, "log.txt"),
            history=output_file(run, HISTORY),
            report=output_report(run),
        )
        say_outputs(run, made)
        return made


def pack_script(path: Path) -> str:
    """Return a zip of a directory. For a script it is a zip of the script's directory, with the
    script's name as comment. Raises InputError if the directory is too large.
    """
    directory, comment = path, b""
    if not path.is_dir():
        directory, comment = path.parent, path.name.encode()
    files = files_below(directory)
    if sum(file.stat().st_size for file in files.values()) > MAX_SIZE:
        raise InputError(
            "script: expected a directory of code without data, because every node gets it, "
            f"got more than {MAX_SIZE >> 20} MiB in {directory}; give data by their URL in the "
            "script's arguments, and write results to {outputs}"
        )
    scratch = FlyteContextManager.current_context().file_access.get_random_local_directory()
    archive = os.path.join(scratch, f"{path.stem}.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as packed:
        for name, file in files.items():
            packed.write(file, name)
        packed.comment = comment
    return archive


def unpack_script(script: Any, entry_point: str, directory: Path) -> Path:
    """Return the path of the script, after unpacking an archive to the new `directory`. Raises
    ConfigError if there is no such script.
    """
    source = Path(str(script.download()))
    entry = entry_point
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as packed:
            packed.extractall(directory)
            entry = entry or packed.comment.decode()
    elif source.is_dir():
        directory = source
    else:
        entry = entry or source.name
        directory = source.parent
    file = directory / entry
    if not file.is_file() or not file.resolve().is_relative_to(directory.resolve()):
        found = ", ".join(sorted(files_below(directory))[:10])
        raise ConfigError(
            f"entry_point: expected the name of a script in script ({found}), got {entry!r}"
        )
    return file


def _refuse(path: str) -> None:
    raise InputError(
        f"script: expected a script or a directory with one, got {path!r}, which does not exist"
    )


class _ScriptTransformer(OptionalTransformer):
    """Packs a script of this machine before flytekit uploads it."""

    async def async_to_literal(
        self, ctx: Any, python_val: Any, python_type: Any, expected: Any
    ) -> Any:
        path = str(getattr(python_val, "path", ""))
        is_ours = "://" not in path and getattr(python_val, "remote_source", None) is None
        if is_ours and not path.endswith(".zip") and os.path.exists(path):
            keeps_path = False in (
                getattr(python_val, name, None) for name in ("remote_path", "remote_directory")
            )
            remote_path = None
            if keeps_path:  # A local run uploads nothing, so the archive stays where it is.
                remote_path = False
            python_val = FlyteFile(pack_script(Path(path).resolve()), remote_path=remote_path)
        return await super().async_to_literal(ctx, python_val, python_type, expected)


TypeEngine.register(_ScriptTransformer(ScriptSource, _refuse))
