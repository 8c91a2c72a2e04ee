"""The flags and variables of `flyte-ddp run`, beside torchrun's."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import socket
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import argparse_util
from torch.distributed.run import get_args_parser

import flyte_ddp
from flyte_ddp import __main__ as command_line
from flyte_ddp.config.fields import HELP
from flyte_ddp.launch import run_options
from flyte_ddp.launch.agent import output
from flyte_ddp.launch.agent.output import LogTail
from flyte_ddp.launch.distributed import Distributed
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.progress_bar import ProgressBar

REPOSITORY = Path(__file__).parents[2]

SHELL = """#!/bin/sh
echo "of $WORLD_SIZE" > "$1/$RANK"
exit $2
"""


def parse(*arguments):
    parser = argparse.ArgumentParser()
    run_options.add_run_options(parser)
    return parser.parse_args([*arguments, "script.py"])


def flags_of_torchrun():
    return [
        action
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ]


def test_the_fields_of_a_gang_are_the_same_for_commands_functions_and_tasks():
    declared = {each.name: each for each in dataclasses.fields(Gang)}
    for call in (flyte_ddp.run, flyte_ddp.train, flyte_ddp.predict, Distributed):
        parameters = inspect.signature(call).parameters
        assert {"nnodes", "nproc_per_node", "cluster"} <= parameters.keys()
        if call in (flyte_ddp.run, Distributed):
            for name in parameters.keys() & declared.keys() - {"nnodes"}:
                assert parameters[name].default == declared[name].default, (call, name)
    helps = {name: each.metadata[HELP] for name, each in declared.items() if each.metadata}
    options = [*run_options.RECIPE_OPTIONS, *run_options.OWN_OPTIONS]
    texts = dict.fromkeys(text.partition(" (default")[0] for _, text, _ in options)
    flags = {name: given.get("help", "") for name, given in run_options.FLAGS.items()}
    for name, text in helps.items():
        flag = f"--{name.replace('_', '-')}"
        assert text in texts or flags[flag].startswith(text), name


def test_every_flag_of_torchrun_is_known_here():
    parser = argparse.ArgumentParser()
    run_options.add_run_options(parser)
    ours = {flag: action for action in parser._actions for flag in action.option_strings}
    theirs = {flag: action for action in flags_of_torchrun() for flag in action.option_strings}
    assert theirs.keys() - ours.keys() == set()
    for flag, action in theirs.items():
        assert (ours[flag].nargs == 0) == (action.nargs == 0), flag


def test_every_flag_is_read_from_its_variable_and_the_command_line_wins(monkeypatch):
    numbers = {
        "max_restarts": "2",
        "node_rank": "0",
        "master_port": "29501",
        "shutdown_timeout": "7",
    }
    given = {**numbers, "nnodes": "1:1", "monitor_interval": "0.5", "start_method": "fork"}
    for action in flags_of_torchrun():
        if not isinstance(action, (argparse_util.env, argparse_util.check_env)):
            continue
        name, flag = action.dest, action.option_strings[0]
        text = "1" if action.nargs == 0 else given.get(name, "text")
        with monkeypatch.context() as context:
            context.setenv(f"PET_{name.upper()}", text)
            expected = True if action.nargs == 0 else int(text) if name in numbers else text
            assert getattr(parse(), name) == expected, name
            if action.nargs == 0:
                context.setenv(f"PET_{name.upper()}", "0")
                assert (getattr(parse(), name), getattr(parse(flag), name)) == (False, True), name
            elif text == "text":
                assert getattr(parse(flag, "other"), name) == "other", name


@pytest.mark.long
def test_a_program_of_any_kind_runs_also_by_variables_and_its_exit_code_counts(
    tmp_path, monkeypatch, capfd
):
    script = tmp_path / "script.sh"
    script.write_text(SHELL)
    script.chmod(0o755)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    assert command_line.main(["run", str(script), str(tmp_path), "0"]) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["of 2\n", "of 2\n"]
    assert command_line.main(["run", "--no-python", str(script), str(tmp_path), "3"]) == 1
    assert "exit code 3" in capfd.readouterr().err


def test_what_changes_nothing_is_one_line_and_a_prefix_can_be_left_out(
    tmp_path, monkeypatch, capfd
):
    (tmp_path / "script.py").write_text(
        "import sys\nprint('a line')\nprint('an error', file=sys.stderr)\n"
    )
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    flags = [
        "--monitor-interval=1",
        "--start-method=fork",
        "-t",
        "3",
        "--log_dir=logs",
        "--run-path",
        "--no-prefix",
    ]
    assert command_line.main(["run", *flags, str(tmp_path / "script.py")]) == 0
    output, errors = capfd.readouterr()
    assert output == "a line\nan error\n"
    given = "--log-dir, --monitor-interval, --run-path, --start-method, --tee, PYTHON_EXEC"
    assert errors.splitlines() == [
        f"{given}: accepted as torchrun's, with no effect here",
        "script.py, 1 rank",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(
            (
                ["--nnodes=2", flag, "0", __file__],
                f"error: {flag}: expected neither the flag nor its PET_ variable: one",
            )
            for flag in run_options.RENDEZVOUS
        ),
        (["--node_rank=1", __file__], "error: --node-rank: expected 0 on one machine, got 1"),
        (
            ["--master-port=65536", __file__],
            (
                "error: master_port: expected a whole number of at least 0 and of at most 65535, "
                "got "
                "65536"
            ),
        ),
        (
            ["--no-python", "no-such-program"],
            "error: script: expected a program that can be executed, got 'no-such-pr",
        ),
        (
            ["--no-python", "-m", "x"],
            "error: --no-python: expected not with --module, which is Python's",
        ),
        (
            ["--shutdown-timeout=-1", __file__],
            "error: --shutdown-timeout: expected a whole number of at least 0, got -1",
        ),
        *(
            (
                [*arguments, __file__],
                f"error: {arguments[0]}: expected neither the flag nor its PET_ variable: {why}",
            )
            for arguments, why in (
                (["--signals-to-handle", "SIGTERM,SIGUSR1"], "SIGTERM, SIGINT"),
                (["--virtual-local-rank"], "each rank sees all GPUs"),
                (["--print-completion", "bash"], "no completion script"),
            )
        ),
        (
            ["missing.py"],
            "error: script: expected a file, or a directory with __main__.py, got 'missing.py'",
        ),
        (
            ["-m", "no_such_module"],
            "error: script: expected a module that Python finds here, got 'no_such_module'",
        ),
        (["--nnodes", "2:1", __file__], "error: nnodes: expected a number of machines"),
        (
            ["--cluster", "{", __file__],
            "error: --cluster: expected a JSON object or the name of a JSON or YAML file, got '{'",
        ),
        (
            ["--cluster", "no.json", __file__],
            (
                "error: --cluster: expected a JSON object or the name of a JSON or YAML file, got "
                "'no.j"
            ),
        ),
        (
            ["--cluster", __file__, __file__],
            "error: --cluster: expected a JSON object or the name of a JSON or YAML file, got",
        ),
        (
            ["--nproc-per-node=gpu", __file__],
            "error: nproc_per_node: expected a number or cpu on a machine without",
        ),
    ],
)
def test_a_command_that_cannot_be_is_refused_in_one_line(arguments, expected, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command_line.main(["run", *arguments]) == 2
    output = capsys.readouterr().err
    assert output.startswith(expected)
    assert output.count("\n") == 1


def test_a_port_that_another_process_has_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert command_line.main(["run", f"--master-port={port}", __file__]) == 2
    assert (
        f"error: master_port: expected a port that is free, or 0, got {port}: "
        in capsys.readouterr().err
    )


def test_of_many_lines_none_is_lost_wherever_a_read_ends(tmp_path):
    tail, stream = LogTail(str(tmp_path / "log")), io.StringIO()
    bar = ProgressBar(io.StringIO(), stream)
    text = "".join(f"line {number} \u00e9\n" for number in range(20_000)) + (
        "half\rdrawn\r\nbad \udcff end\nno break"
    )
    contents = text.encode(errors="surrogateescape")
    # The cuts are in the middle of lines, characters and drawn lines.
    for start in range(0, len(contents), 9_973):
        with open(tmp_path / "log", "ab") as file:
            file.write(contents[start : start + 9_973])
        for line in tail.new_lines(at_end=start + 9_973 >= len(contents)):
            bar.write(line)
    bar.close(None)
    lines = stream.getvalue().splitlines()
    assert lines[:20_000] == text.splitlines()[:20_000]
    assert lines[20_000:] == ["drawn", "bad \ufffd end", "no break"]


def test_of_a_large_output_the_end_is_kept_in_memory_and_on_the_disk(tmp_path):
    path, kept, started = tmp_path / "log", [], time.monotonic()
    tail, chunk, num_lines = LogTail(str(path)), [], 0
    for _ in range(12):
        with open(path, "ab") as file:  # A rank's descriptor of this file stays open.
            chunk = [f"line {num_lines + number} {90 * '-'}" for number in range(80_000)]
            num_lines += len(chunk)
            file.write("".join(f"{line}\n" for line in chunk).encode())
        kept += tail.new_lines()
        assert tail.last_lines(3).splitlines() == chunk[-3:]
        assert path.stat().st_size <= output.MAX_FILE + 16 * 2**20
    assert kept[-1] == chunk[-1]
    assert kept.count(output.LEFT_OUT) == 1
    most = output.MAX_BURST + output.RATE * (time.monotonic() - started) + 12 * output.MAX_LINE
    assert output.MAX_BURST < sum(map(len, kept)) < most < 100 * num_lines
    numbers = [int(line.split()[1]) for line in kept if line.startswith("line ")]
    assert numbers == sorted(set(numbers))
    with open(path, "ab") as file:
        file.write(b"the end")
    assert tail.new_lines(at_end=True) == ["the end"]


def test_a_long_line_is_passed_on_in_pieces(tmp_path):
    tail, pieces = LogTail(str(tmp_path / "log")), []
    for _ in range(6):
        with open(tmp_path / "log", "ab") as file:
            file.write(b"x" * 900_000)
        pieces += tail.new_lines()
    pieces += tail.new_lines(at_end=True)
    assert "".join(pieces) == "x" * 5_400_000
    assert len(pieces) == 3
