"""`flyte-ddp rehearse PROGRAM`: run a program with faults on purpose, and print whether it still
trains the same model. Imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pkgutil
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flyte_ddp.config.fields import finite_number, whole_number
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.agent.rank_start import start_server
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import OUTPUTS, function_program, script_program
from flyte_ddp.launch.train_options import read_fields
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.rehearsal.forecast import describe_forecast, forecast, read_plan
from flyte_ddp.rehearsal.runs import TITLES, Rehearsal
from flyte_ddp.rehearsal.verdict import Row, Verdict, judge

OPTIONS = (
    ("--nproc-per-node", "ranks of the undisturbed run (default 2)", 2),
    (
        "--minutes",
        "time for all runs; a recipe's epochs are shortened to fit into it (default 2)",
        2.0,
    ),
    ("--data", "path or URL of the data, for a recipe that reads data of yours", ""),
    (
        "--per-hour",
        "forecast the goodput with so many faults an hour, such as kill=0.5,node=2; also notice, "
        "store, disk",
        "",
    ),
    (
        "--interval",
        "for the forecast: seconds between two states that a restart can begin with (default: as "
        "in the rehearsal)",
        0.0,
    ),
    (
        "--absence",
        "for the forecast: seconds until another node takes the place of a lost one (default: as "
        "on this machine)",
        -1.0,
    ),
    ("--elastic", "for the forecast: the gang goes on without a lost node, and grows again", False),
    ("--hours", "for the forecast: length of the training, whose start then counts", 0.0),
    ("--json", "print the verdict as JSON", False),
    ("--report", "file for the HTML page", ""),
    ("program", "a script, MODULE:FUNCTION, or the name of a recipe", None),
)
# heads of the table's columns; the text prints their two words in two lines
HEADS = (
    "fault",
    "verdict",
    "steps repeated",
    "restarts",
    "exit code",
    "longest pause",
    "samples lost",
    "samples doubled",
    "weights",
    "extra files",
)


def main(arguments: Sequence[str]) -> int:
    """Rehearse a program, and print the table and the causes. Return 0 if all results are right,
    and 1 otherwise.
    """
    about = "Run a program undisturbed and with each fault, and compare the runs."
    parser = make_parser("rehearse", about, OPTIONS)
    text = (
        f"arguments of the script, where {OUTPUTS} stands for a directory of each run; or fields "
        "of the recipe"
    )
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help=text)
    options = parser.parse_args(arguments)
    minutes = finite_number("--minutes", options.minutes, above=0, unit="minutes")
    num_ranks = whole_number("--nproc-per-node", options.nproc_per_node, minimum=1)
    plan = read_plan(
        options.per_hour,
        interval=options.interval,
        absence=options.absence,
        elastic=options.elastic,
        hours=options.hours,
    )
    modules = find_imports(options.program)
    start_server(modules)
    # SIGTERM raises SystemExit, so that the blocks below end their processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with temporary_directory("rehearsal-") as directory:
        make_program, data = find_program(
            options.program, options.arguments, options.data, directory
        )
        rehearsal = Rehearsal(
            make_program,
            data,
            modules,
            Path(directory),
            num_ranks,
            60 * minutes,
        )
        runs = list(rehearsal.rehearse())
    verdict = judge(runs)
    if plan:
        verdict.forecast = forecast(runs, plan)
    if options.report:
        from flyte_ddp.rehearsal.page import RehearsalPage

        page = RehearsalPage(options.program, verdict, format_row, file=Path(options.report))
        page.close(None)  # The page then shows that the rehearsal has finished.
    sys.stdout.write(f"{describe_json(verdict) if options.json else describe(verdict)}\n")
    return 0 if verdict.is_right else 1


def find_program(
    name: str, arguments: Sequence[str], data: str, directory: str
) -> tuple[Callable[[str, int], Program], Callable[[], str] | None]:
    """Return the arguments `make_program` and `data` of `Rehearsal` for a script, a function or a
    recipe. Prepare the data of a recipe below `directory`.

    Args:
        data: path or URL that the user gave; "" for the recipe's default.

    Raises:
        ConfigError: there is no such script, function or recipe.
    """
    if name.endswith(".py") or Path(name).exists():
        script = str(Path(name).resolve())

        def make_script(outputs: str, _: int) -> Program:
            return script_program(script, [each.replace(OUTPUTS, outputs) for each in arguments])

        return make_script, None
    if ":" in name:
        if arguments:
            raise ConfigError(
                "rehearse: expected options before MODULE:FUNCTION, which takes no arguments, got "
                f"{shlex.join(arguments)!r} after it"
            )
        try:
            function = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"rehearse: expected MODULE:FUNCTION, got {name!r}: {error}"
            ) from None
        return lambda *_: function_program(function, arguments=(), keywords={}), None
    fields = read_fields(arguments)
    prepared = Path(directory, "data")
    prepared.mkdir()
    config = config_of(name, fields)
    prepare_data(get_recipe(name, config.recipe_options), data, prepared)

    def make_recipe(_: str, num_samples: int) -> Program:
        shorter: dict[str, Any] = {"sample_size": num_samples} if num_samples else {}
        return recipe_program(name, config_of(name, {**fields, **shorter}))

    return make_recipe, lambda: str(prepared)


def find_imports(program: str) -> tuple[str, ...]:
    """Return the modules that the fork server imports once for the ranks of all runs: torch, and
    the installed modules that a script imports at the beginning of a line.
    """
    text = ""
    if program.endswith(".py") and Path(program).is_file():
        text = Path(program).read_text(errors="replace")
    found = re.findall(r"^(?:import|from) ([\w.]+)", text, re.M)
    names = []
    for name in ("torch", "torch._dynamo", *found):  # DDP imports torch._dynamo
        top = name.partition(".")[0]
        if top and top not in sys.stdlib_module_names and "site-packages" in str(find_spec(top)):
            names.append(name)
    return tuple(names)


def format_row(row: Row) -> dict[str, str]:
    """Return the texts of a row of the table, by their heads."""
    run = row.run
    texts = [TITLES[run.name], f"not tried: {run.not_tried}"]
    if not run.not_tried:
        pause = f"{run.pause:.1f} s"
        if run.name == "again":  # This run starts a finished run once more: there is no pause.
            pause = ""
        texts = [
            TITLES[run.name],
            row.verdict,
            str(run.num_redone),
            str(len(run.attempts) - 1),
            str(run.exit_code),
            pause,
            str(row.lost),
            str(row.doubled),
            _describe_weights(row),
            str(row.left),
        ]
    return dict(itertools.zip_longest(HEADS, texts, fillvalue=""))


def _describe_weights(row: Row) -> str:
    if row.difference < 1e-6:
        return "equal"
    if row.unjudged:
        return "not judged"
    return f"{row.difference:.2g} apart"


def describe(verdict: Verdict) -> str:
    """Return the table, the verdict, what is wrong, and the causes, as text."""
    heads = [head.partition(" ") for head in HEADS]
    rows = [
        [first for first, _, _ in heads],
        [second for _, _, second in heads],
        *(list(format_row(row).values()) for row in verdict.rows),
    ]
    # A run that was not tried has a reason, which may be longer than the columns.
    tried = [row for row in rows if row[2]]
    widths = [max(map(len, column)) for column in zip(*tried, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += ["", f"verdict: {'right' if verdict.is_right else 'wrong'}"]
    lines += [
        f"  {TITLES[row.run.name]}: {'; '.join(row.notes)}" for row in verdict.rows if row.notes
    ]
    lines += [f"{cause.name}: {cause.text}" for cause in verdict.causes]
    if verdict.forecast:
        lines += describe_forecast(verdict.forecast, TITLES)
    return "\n".join(lines)


def describe_json(verdict: Verdict) -> str:
    rows = [
        {
            "fault": row.run.name,
            "verdict": row.verdict,
            "not_tried": row.run.not_tried,
            "problems": row.problems,
            "steps": len(row.run.steps),
            "steps_again": row.run.num_redone,
            "restarts": max(0, len(row.run.attempts) - 1),
            "exit_code": row.run.exit_code,
            "seconds_without_a_step": row.run.pause,
            "samples_lost": row.lost,
            "samples_doubled": row.doubled,
            "weights_difference": row.difference,
            "weights_not_judged": row.unjudged,
            "files_left": row.left,
        }
        for row in verdict.rows
    ]
    causes = [
        {"name": each.name, "where": each.where, "text": each.text} for each in verdict.causes
    ]
    values = {"right": verdict.is_right, "rows": rows, "causes": causes}
    if verdict.forecast:
        values["forecast"] = dataclasses.asdict(verdict.forecast)
    return json.dumps(values, indent=2)
