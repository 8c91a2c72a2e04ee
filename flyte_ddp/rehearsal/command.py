"""`flyte-ddp rehearse SCRIPT`: run it with faults on purpose, and tell whether it is right. Imports
no torch.
"""

from __future__ import annotations

import argparse
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
from flyte_ddp.launch.agent.scratch import own_directory
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import OUTPUTS, function_program, script_program
from flyte_ddp.launch.train_options import read_fields
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.rehearsal.runs import TITLES, Rehearsal
from flyte_ddp.rehearsal.verdict import Row, Verdict, judge

OPTIONS = (
    ("--nproc-per-node", "ranks of the undisturbed run (default 2)", 2),
    ("--minutes", "for all runs: epochs are shortened where it is too little (default 2)", 2.0),
    ("--data", "path or URL, for recipes that read data of yours", ""),
    ("--json", "print the verdict as JSON", False),
    ("--report", "file for the HTML page", ""),
    ("program", "a script, MODULE:FUNCTION, or the name of a recipe", None),
)
HEADS = (
    *("fault", "verdict", "steps again", "restarts", "exit", "pause", "lost", "doubled"),
    *("weights", "files left"),
)


def main(arguments: Sequence[str]) -> int:
    """Rehearse a program, print the table and the causes; return 0 if all results are right, else
    1.
    """
    text = "Run a program undisturbed and with each fault, and compare the runs."
    parser = make_parser("rehearse", text, OPTIONS)
    text = f"of the script, in which {OUTPUTS} is a directory of each run; fields of the recipe"
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help=text)
    options = parser.parse_args(arguments)
    minutes = finite_number("--minutes", options.minutes, above=0, unit="minutes")
    num_ranks = whole_number("--nproc-per-node", options.nproc_per_node, minimum=1)
    modules = find_imports(options.program)
    start_server(modules)
    # SystemExit leaves no process behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with own_directory("rehearsal-") as directory:
        make, data = find_program(options.program, options.arguments, options.data, directory)
        rehearsal = Rehearsal(
            make,
            data,
            modules,
            Path(directory),
            num_ranks,
            60 * minutes,
        )
        verdict = judge(list(rehearsal.rehearse()))
    if options.report:
        from flyte_ddp.rehearsal.page import RehearsalPage

        page = RehearsalPage(options.program, verdict, cells)
        page.close(None)
        page.write(Path(options.report))
    sys.stdout.write(f"{describe_json(verdict) if options.json else describe(verdict)}\n")
    return 0 if verdict.is_right else 1


def find_program(
    name: str, arguments: Sequence[str], data: str, directory: str
) -> tuple[Callable[[str, int], Program], Callable[[], str] | None]:
    """Return what `Rehearsal` needs to make the program, and a recipe's data.

    Raises:
        ConfigError: there is no such script, function or recipe.
    """
    if name.endswith(".py") or Path(name).exists():
        script = str(Path(name).resolve())
        return lambda outputs, _: script_program(
            script, [each.replace(OUTPUTS, outputs) for each in arguments]
        ), None
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
        return lambda *_: function_program(function, (), {}), None
    fields = read_fields(arguments)
    prepared = Path(directory, "data")
    prepared.mkdir()
    config = config_of(name, fields)
    prepare_data(get_recipe(name, config.recipe_options), data, prepared)

    def make(_: str, length: int) -> Program:
        shorter: dict[str, Any] = {"sample_size": length} if length else {}
        return recipe_program(name, config_of(name, {**fields, **shorter}))

    return make, lambda: str(prepared)


def find_imports(script: str) -> tuple[str, ...]:
    """Return what the server of ranks imports once for all runs: torch, and the installed modules
    that a script imports at its top.
    """
    is_script = script.endswith(".py") and Path(script).is_file()
    text = Path(script).read_text(errors="replace") if is_script else ""
    found = re.findall(r"^(?:import|from) ([\w.]+)", text, re.M)
    names = []
    for name in ("torch", "torch._dynamo", *found):  # DDP imports the second one
        top = name.partition(".")[0]
        if top and top not in sys.stdlib_module_names and "site-packages" in str(find_spec(top)):
            names.append(name)
    return tuple(names)


def cells(row: Row) -> dict[str, str]:
    """Return a row of the table, by its heads."""
    run = row.run
    texts = [TITLES[run.name], f"not tried: {run.not_tried}"]
    if not run.not_tried:
        texts = [
            *(TITLES[run.name], row.verdict, str(run.num_redone), str(len(run.attempts) - 1)),
            *(str(run.exit_code), f"{run.pause:.1f} s" if run.name != "again" else ""),
            *(str(row.lost), str(row.doubled)),
            *(_describe_weights(row), str(row.left)),
        ]
    return dict(itertools.zip_longest(HEADS, texts, fillvalue=""))


def _describe_weights(row: Row) -> str:
    if row.difference < 1e-6:
        return "equal"
    if row.unjudged:
        return "not judged"
    return f"{row.difference:.2g} apart"


def describe(verdict: Verdict) -> str:
    """Return the table, what is wrong, and the causes, as text."""
    rows = [list(HEADS), *(list(cells(row).values()) for row in verdict.rows)]
    tried = [row for row in rows if row[2]]
    widths = [max(map(len, column)) for column in zip(*tried, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += ["", "right" if verdict.is_right else "wrong"]
    lines += [
        f"  {TITLES[row.run.name]}: {'; '.join(row.notes)}" for row in verdict.rows if row.notes
    ]
    return "\n".join([*lines, *(f"{cause.name}: {cause.text}" for cause in verdict.causes)])


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
    return json.dumps({"right": verdict.is_right, "rows": rows, "causes": causes}, indent=2)
