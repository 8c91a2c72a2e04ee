"""The flags and variables of `flyte-ddp run`, beside torchrun's."""

from __future__ import annotations

import argparse
import io
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import argparse_util
from torch.distributed.run import get_args_parser

from flyte_ddp import __main__ as command_line
from flyte_ddp.launch import run_options
from flyte_ddp.launch.process.output import LogTail
from flyte_ddp.observers.progress_bar import ProgressBar
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[1]

# Writes down what a rank finds, as bin/test_script.py of torchrun's tests touches a file.
SCRIPT = """
import json, os, sys
names = ("ROLE_NAME", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_MAX_RESTARTS")
names += ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TEST_SENTINEL_PARENT")
found = {name: os.environ[name] for name in names}
found["is launched"] = "TORCHELASTIC_RUN_ID" in os.environ
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([found, sys.argv[2:], __name__], file)
print("to stdout")
print("to stderr", file=sys.stderr)
sys.exit(3 if "--fail" in sys.argv else 0)
"""  # noqa: E501
SHELL = """#!/bin/sh
echo "creating $1/$RANK"
echo "\\"$2 of $WORLD_SIZE\\"" > "$1/$RANK"
"""
MEETS = """
import json, os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(os.environ["RANK"]), world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([total.item(), dist.is_torchelastic_launched()], file)
dist.destroy_process_group()
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


@pytest.mark.slow  # torchrun starts a dozen times
def test_command_lines_do_what_they_do_under_torchrun(tmp_path, monkeypatch, capfd):
    """The cases of torchrun's test/distributed/launcher/test_run.py that concern the command
    line.
    """
    for name, text in (("script.py", SCRIPT), ("script.sh", SHELL), ("meets.py", MEETS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script, shell, meets = (str(tmp_path / name) for name in ("script.py", "script.sh", "meets.py"))
    common = ["--nnodes=1", "--nproc-per-node=2", "--monitor-interval=1", "--start-method=spawn"]
    port = {name: {one: free_port() for one in ("tcp", "bc")} for name in ("theirs", "ours")}
    cases = {
        "a script": ([*common, "--rdzv-id=7", script, "{}", "--lr", "1"], {}),
        "an old line": (
            [
                *common,
                "--master-addr=localhost",
                "--master-port={bc}",
                "--node-rank=0",
                script,
                "{}",
            ],
            {},
        ),
        "a free port": (
            [
                "--rdzv_backend=c10d",
                "--rdzv_endpoint=localhost:0",
                "--nproc_per_node=2",
                script,
                "{}",
            ],
            {},
        ),
        "standalone": ([*common, "--standalone", "--rdzv-backend=c10d", script, "{}"], {}),
        "a time": (
            [*common, "--max-restarts=2", "--shutdown-timeout=3", script, "{}", "--lr", "1"],
            {},
        ),
        "one rank": (["--nnodes=1", "--no-python", shell, "{}", "x"], {}),
        "a shell script": ([*common, "--no-python", shell, "{}", "x"], {}),
        "two kinds": ([*common, "--no-python", "--module", shell, "{}"], {}),
        "variables": (
            [shell, "{}", "x"],
            {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NO_PYTHON": "1"},
        ),
        "two kinds in variables": ([shell, "{}"], {"PET_NO_PYTHON": "1", "PET_MODULE": "1"}),
        "a failure": ([*common, script, "{}", "--fail"], {}),
        "unknown ranks": (["--nproc-per-node=unknown", script, "{}"], {}),
        "too many nodes": (["--nnodes=2:20:30", script, "{}"], {}),
        # A meeting by variables is in test_run.py.
        "a meeting": ([*common, "--master-port={tcp}", meets, "{}", "tcp://localhost:{tcp}"], {}),
    }
    monkeypatch.setenv("TEST_SENTINEL_PARENT", "FOOBAR")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def fill(side, name, arguments):
        directory = tmp_path / side / name
        directory.mkdir(parents=True)
        for key, number in port[side].items():
            arguments = [each.replace(f"{{{key}}}", str(number)) for each in arguments]
        return [each.replace("{}", str(directory)) for each in arguments]

    (tmp_path / "cases").write_text(
        json.dumps(
            [
                [fill("theirs", name, arguments), variables]
                for name, (arguments, variables) in cases.items()
            ]
        )
    )
    torchrun = subprocess.Popen(
        [
            sys.executable,
            REPOSITORY / "tests/support/torchrun_cases.py",
            tmp_path / "cases",
            tmp_path / "results",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = {}
    for name, (arguments, variables) in cases.items():
        with monkeypatch.context() as context:
            for variable, value in variables.items():
                context.setenv(variable, value)
            status = command_line.main(["run", *fill("ours", name, arguments)])
        output, errors = capfd.readouterr()
        assert status != 2 or (errors.startswith("error: ") and errors.count("\n") == 1), errors
        found[name] = (status, output)
    _, errors = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, errors

    def files_of(side, name):
        """{file: contents} below the directory of a case, without what torchrun names by chance."""
        directory = tmp_path / side / name
        files = {}
        for file in sorted(each for each in directory.rglob("*") if each.is_file()):
            path = re.sub(r"logs/[^/]+/", "logs/", str(file.relative_to(directory)))
            files[path] = sorted(file.read_text().replace(str(directory), "").splitlines())
        return files

    for (name, (status, output)), (their_status, their_output) in zip(
        found.items(), json.loads((tmp_path / "results").read_text()), strict=True
    ):
        assert (status == 0) == (their_status == "success"), (
            name,
            output,
            their_status,
            their_output,
            errors,
        )
        assert files_of("ours", name) == files_of("theirs", name), name
    refused = {name for name, (status, _) in found.items() if status == 2}
    assert refused == {
        name for name in cases if name.startswith(("two kinds", "unknown", "too many"))
    }


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
    ],
)
def test_a_flag_that_cannot_be_is_refused_in_one_line(arguments, expected, capsys):
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


class CountingStream(io.StringIO):
    num_flushes = 0

    def flush(self):
        self.num_flushes += 1
        super().flush()


def test_of_many_lines_none_is_lost_wherever_a_read_ends(tmp_path):
    tail, stream = LogTail(str(tmp_path / "log")), io.StringIO()
    bar = ProgressBar(io.StringIO(), stream)
    text = "".join(f"line {number} \u00e9\n" for number in range(20_000)) + (
        "half\rdrawn\r\nbad \udcff end\nno break"
    )
    contents = text.encode(errors="surrogateescape")
    # in the middle of lines, characters and drawn lines
    for start in range(0, len(contents), 9_973):
        with open(tmp_path / "log", "ab") as file:
            file.write(contents[start : start + 9_973])
        for line in tail.new_lines(at_end=start + 9_973 >= len(contents)):
            bar.write(line)
    bar.close(None)
    lines = stream.getvalue().splitlines()
    assert lines[:20_000] == text.splitlines()[:20_000]
    assert lines[20_000:] == ["drawn", "bad \ufffd end", "no break"]


def test_a_line_is_shown_soon_although_no_other_follows():
    stream = CountingStream()
    ProgressBar(io.StringIO(), stream).write("the only one")
    deadline = time.monotonic() + 30
    while not stream.num_flushes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stream.num_flushes == 1
