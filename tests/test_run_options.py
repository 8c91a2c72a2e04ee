"""The flags and variables of `python -m flyte_ddp run`, beside torchrun's."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import resource
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
from flyte_ddp.launch.dask.messages import NodeJob
from flyte_ddp.launch.process.entry import environment
from flyte_ddp.launch.process.output import LogTail
from flyte_ddp.launch.process.programs import Job
from flyte_ddp.launch.process.ranks import NodeRanks
from flyte_ddp.observers.progress_bar import ProgressBar
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[1]
GUIDE = (REPOSITORY / "docs/your-own-function.md").read_text()

# Writes down what a rank finds, as bin/test_script.py of torchrun's tests touches a file.
SCRIPT = """
import json, os, sys
names = ("ROLE_NAME", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_MAX_RESTARTS")
names += ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TEST_SENTINEL_PARENT")
found = {name: os.environ[name] for name in names}
found["is launched"] = "TORCHELASTIC_RUN_ID" in os.environ
found["can write errors"] = os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([found, sys.argv[2:], __name__], file)
print("to stdout")
print("to stderr", file=sys.stderr)
sys.exit(3 if "--fail" in sys.argv else 0)
"""
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
    return [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]


def test_every_flag_and_variable_of_torchrun_is_known_here_and_stands_in_the_guide():
    parser = argparse.ArgumentParser()
    run_options.add_run_options(parser)
    ours = {flag: action for action in parser._actions for flag in action.option_strings}
    theirs = {flag: action for action in flags_of_torchrun() for flag in action.option_strings}
    assert theirs.keys() - ours.keys() == set()
    for flag, action in theirs.items():
        assert (ours[flag].nargs == 0) == (action.nargs == 0), flag
        if flag.startswith("--") and "_" not in flag:
            assert f"`{flag}`" in GUIDE, flag
    table = GUIDE.partition("### Flags and variables of torchrun")[2].partition("\n## ")[0]
    package = Path(argparse_util.__file__).parent
    sources = [*package.glob("elastic/agent/server/*.py"), *package.glob("elastic/multiprocessing/**/*.py")]
    text = " ".join(file.read_text() for file in [*sources, package / "run.py", package / "launcher/api.py"])
    variables = set(re.findall(r'"(TORCHELASTIC_[A-Z_]+|TORCH_ELASTIC_[A-Z_]+|PYTHON_EXEC|OMP_NUM_THREADS)"', text))
    assert len(variables) > 12
    assert {name for name in variables if f"`{name}`" not in table} == set()


def test_every_flag_is_read_from_its_variable_and_the_command_line_wins(monkeypatch):
    numbers = {"max_restarts": "2", "node_rank": "0", "master_port": "29501", "shutdown_timeout": "7"}
    given = {**numbers, "nnodes": "1:1", "monitor_interval": "0.5", "start_method": "fork"}
    given |= {"duplicate_stdout_filters": "a,b,,c", "duplicate_stderr_filters": "a,b,,c"}
    for action in flags_of_torchrun():
        if not isinstance(action, (argparse_util.env, argparse_util.check_env)):
            continue
        name, flag = action.dest, action.option_strings[0]
        text = "1" if action.nargs == 0 else given.get(name, "text")
        with monkeypatch.context() as context:
            context.setenv(f"PET_{name.upper()}", text)
            expected = {"1": True, "a,b,,c": ["a", "b,c"]}.get(text, int(text) if name in numbers else text)
            assert getattr(parse(), name) == expected, name
            if action.nargs == 0:
                context.setenv(f"PET_{name.upper()}", "0")
                assert (getattr(parse(), name), getattr(parse(flag), name)) == (False, True), name
            elif text == "text":
                assert getattr(parse(flag, "other"), name) == "other", name


@pytest.mark.slow  # torchrun starts a dozen times
def test_command_lines_do_what_they_do_under_torchrun(tmp_path, monkeypatch, capfd):
    """The cases of torchrun's test/distributed/launcher/test_run.py that concern the command line."""
    for name, text in (("script.py", SCRIPT), ("script.sh", SHELL), ("meets.py", MEETS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script, shell, meets = (str(tmp_path / name) for name in ("script.py", "script.sh", "meets.py"))
    common = ["--nnodes=1", "--nproc-per-node=2", "--monitor-interval=1", "--start-method=spawn"]
    port = {name: {one: free_port() for one in ("tcp", "bc")} for name in ("theirs", "ours")}
    cases = {
        "a script": ([*common, "--rdzv-id=7", script, "{}", "--lr", "1"], {}),
        "an old line": ([*common, "--master-addr=localhost", "--master-port={bc}", "--node-rank=0", script, "{}"], {}),
        "a free port": (["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--nproc_per_node=2", script, "{}"], {}),
        "standalone": ([*common, "--standalone", "--rdzv-backend=c10d", "--role=worker", script, "{}"], {}),
        "a path": (["--run-path", "--no-python", "--max-restarts=2", script, "{}", "--lr", "1"], {}),
        "signals": ([*common, "--signals-to-handle=SIGTERM,SIGUSR1", "--shutdown-timeout=3", script, "{}"], {}),
        "one rank": (["--nnodes=1", "--no-python", shell, "{}", "x"], {}),
        "a shell script": ([*common, "--no-python", shell, "{}", "x"], {}),
        "two kinds": ([*common, "--no-python", "--module", shell, "{}"], {}),
        "variables": ([shell, "{}", "x"], {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NO_PYTHON": "1"}),
        "two kinds in variables": ([shell, "{}"], {"PET_NO_PYTHON": "1", "PET_MODULE": "1"}),
        "an interpreter": ([*common, script, "{}", "--lr"], {"PYTHON_EXEC": sys.executable}),
        "a failure": ([*common, script, "{}", "--fail"], {}),
        "unknown ranks": (["--nproc-per-node=unknown", script, "{}"], {}),
        "too many nodes": (["--nnodes=2:20:30", script, "{}"], {}),
        "a wrong filter": (["--local-ranks-filter=a", script, "{}"], {}),
        "a wrong stream": (["--tee=4", script, "{}"], {}),
        # A meeting by variables is in test_run.py.
        "a meeting": ([*common, "--master-port={tcp}", meets, "{}", "tcp://localhost:{tcp}"], {}),
        "lines of shells": (
            [*common, "--redirect=3", "--tee=3", "--no-python", shell, "{}"],
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "},
        ),
        "lines of one rank": (
            [
                *common,
                "-t",
                "0:3,1:3",
                "--local_ranks_filter=1",
                "--log_line_prefix_template=${role_name}-${local_rank}>",
            ]
            + ["--log-dir={}/logs", "--duplicate-stdout-filters=no,std", script, "{}"],
            {},
        ),
        "redirected": ([*common, "-r", "0:1,1:3", "--log-dir={}/logs", "--tee=0:2", script, "{}"], {}),
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
        json.dumps([[fill("theirs", name, arguments), variables] for name, (arguments, variables) in cases.items()])
    )
    torchrun = subprocess.Popen(
        [sys.executable, REPOSITORY / "tests/support/torchrun_cases.py", tmp_path / "cases", tmp_path / "results"],
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
        assert (status == 0) == (their_status == "success"), (name, output, their_status, their_output, errors)
        assert files_of("ours", name) == files_of("theirs", name), name
        if "lines" in name:
            ours, theirs = (text.replace(f"{side}/", "") for text, side in ((output, "ours"), (their_output, "theirs")))
            assert sorted(ours.splitlines()) == sorted(theirs.splitlines()), name
    refused = {name for name, (status, _) in found.items() if status == 2}
    assert refused == {name for name in cases if name.startswith(("two kinds", "unknown", "too many", "a wrong"))}
    assert found["redirected"][1] == "[rank 0] to stderr\n"


def test_what_changes_nothing_is_one_line_and_a_prefix_can_be_left_out(tmp_path, monkeypatch, capfd):
    (tmp_path / "script.py").write_text("import sys\nprint('a line')\nprint('an error', file=sys.stderr)\n")
    flags = ["--monitor-interval=1", "--start-method=fork", "--local-addr=host", "--numa-binding=node", "--no-prefix"]
    assert command_line.main(["run", *flags, str(tmp_path / "script.py")]) == 0
    output, errors = capfd.readouterr()
    assert output == "a line\nan error\n"
    line = (
        "--monitor-interval, --start-method, --local-addr, --numa-binding: accepted as torchrun's, with no effect here"
    )
    assert errors.splitlines() == [line, "script.py, 1 rank"]

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(run_options.tempfile, "tempdir", None)
    assert command_line.main(["run", "--redirects=0:2", str(tmp_path / "script.py")]) == 0
    output, errors = capfd.readouterr()
    assert output == "[rank 0] a line\n"
    directory = Path(errors.splitlines()[0].removeprefix("--log-dir: "))
    (file,) = directory.glob("*/attempt_0/0/stderr.log")
    assert file.read_text() == "an error\n"


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
            "error: master_port: expected a whole number of at least 0 and of at most 65535, got 65536",
        ),
        (["--no-python", "no-such-program"], "error: script: expected a program that can be executed, got 'no-such-pr"),
        (["--no-python", "-m", "x"], "error: --no-python: expected not with --module, which is Python's"),
        (
            ["--redirects=0:4", __file__],
            "error: --redirects: expected 0, 1, 2 or 3, or one of them for each local rank",
        ),
        (
            ["--local-ranks-filter=0,", __file__],
            "error: --local-ranks-filter: expected local ranks such as 0,2, got '0,",
        ),
        (["--signals-to-handle=SIGKILL", __file__], "error: --signals-to-handle: expected signals that can be handled"),
        (["--shutdown-timeout=-1", __file__], "error: --shutdown-timeout: expected seconds of at least 0, got -1"),
        (["--log-dir", __file__, __file__], "error: --log-dir: expected a directory, got the file"),
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
    assert f"error: master_port: expected a port that is free, or 0, got {port}: " in capsys.readouterr().err


def test_a_program_reaches_the_nodes_of_a_cluster_with_all_its_options(tmp_path):
    flags = ["--tee=0:3", "--duplicate-stdout-filters=loss,lr", "--role=worker", "--signals-to-handle=SIGTERM,SIGUSR1"]
    arguments = [*flags, f"--log-dir={tmp_path}", "--log-line-prefix-template=${role_name}${rank} of ${hostname}>"]
    parser = argparse.ArgumentParser()
    run_options.add_run_options(parser)
    program = run_options.read_program(parser.parse_args([*arguments, "--virtual-local-rank", __file__]))
    node = NodeRanks(4, 2, 8, "host", 1, "lo", False, 1, run_id="id", node_rank=2, num_restarts=1)
    sent = NodeJob(Job(program, "", 0.0), node, 1.0, {}, {}, "", "", "", False).to_json()
    arrived = NodeJob.from_json(sent)
    assert arrived.job.program == program
    assert (
        environment(arrived.job, arrived.ranks, 1).items()
        >= {
            "LOCAL_RANK": "0",
            "RANK": "5",
            "ROLE_NAME": "worker",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1",
        }.items()
    )
    assert program.output.prefix_of(node, 1) == f"worker5 of {socket.gethostname()}>"
    streams = program.output.streams("logs", node, 0)
    assert streams[1].path == str(tmp_path / "id_2/attempt_1/0/stdout.log")
    assert streams[1].filters == ("loss", "lr")
    assert program.output.streams("logs", node, 1)[2].path == "logs/rank-5.log"


@pytest.mark.parametrize("end", ["sys.exit(status)", "os._exit(status)"])
def test_what_record_wrote_down_below_a_rank_is_part_of_the_error(end, tmp_path, capfd):
    """The script ends without an exception: its child had one, in a function that torch's @record decorates."""
    child = "import json, os; json.dump({'message': {'message': 'ValueError: bad lr'}}, open(os.environ['FILE'], 'w'))"
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys\n"
        "os.environ['FILE'] = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\n"
        f"status = 3\n{end}\n"
    )
    assert command_line.main(["run", str(tmp_path / "parent.py")]) == 1
    assert "\nrecorded: ValueError: bad lr\n" in capfd.readouterr().err


class CountingStream(io.StringIO):
    num_flushes = 0

    def flush(self):
        self.num_flushes += 1
        super().flush()


def test_many_lines_are_written_many_at_a_time_and_none_is_lost(tmp_path):
    tail, stream = LogTail(str(tmp_path / "log")), CountingStream()
    bar = ProgressBar(io.StringIO(), stream)
    text = "".join(f"line {number} \u00e9\n" for number in range(20_000)) + "half\rdrawn\r\nbad \udcff end\nno break"
    contents = text.encode(errors="surrogateescape")
    for start in range(0, len(contents), 9_973):  # in the middle of lines, characters and drawn lines
        with open(tmp_path / "log", "ab") as file:
            file.write(contents[start : start + 9_973])
        for line in tail.new_lines(at_end=start + 9_973 >= len(contents)):
            bar.write(line)
    bar.close(None)
    lines = stream.getvalue().splitlines()
    assert lines[:20_000] == text.splitlines()[:20_000]
    assert lines[20_000:] == ["drawn", "bad \ufffd end", "no break"]
    assert stream.num_flushes < 1_000


def test_a_line_is_shown_soon_although_no_other_follows():
    stream = CountingStream()
    ProgressBar(io.StringIO(), stream).write("the only one")
    deadline = time.monotonic() + 30
    while not stream.num_flushes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stream.num_flushes == 1


@pytest.mark.slow
def test_printing_costs_no_more_than_under_torchrun(tmp_path):
    """Seconds of processor time, which other processes hardly change, for 400,000 lines of four ranks."""
    (tmp_path / "prints.py").write_text("for step in range(100_000):\n    print(f'step {step}, loss 0.12345')\n")
    seconds = {}
    for command in ("torch.distributed.run", "flyte_ddp run"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", *command.split(), "--nproc-per-node=4", str(tmp_path / "prints.py")],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            timeout=300,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[command] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert done.stdout.count(b"\n") == 400_000
    assert seconds["flyte_ddp run"] < 1.2 * seconds["torch.distributed.run"], seconds
