"""The single-node workflow as its users meet it: by `pyflyte run`, and by the command that Flyte
starts in a pod.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from flyte_ddp.events import EpochFinished, Listener
from flyte_ddp.task_run.run import TaskRun
from tests.support.commands import run_command

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WORKFLOW = ["workflows/single_node.py", "single_node_training_wf"]
SMALL = {"epochs": 2, "learning_rate": 0.003}


def pyflyte_run(*arguments, **environment):
    """Return the exit code and all that `pyflyte run` prints, without a process of its own."""
    values = {"WANDB_MODE": "disabled", **environment}
    code, output, errors = run_command(
        "pyflyte", "run", *WORKFLOW, *arguments, cwd=REPOSITORY, **values
    )
    return code, " ".join(re.sub(r"[│╭╮╰╯─\n]", " ", output + errors).split())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def local_run(place):
    """Two epochs of digits on two ranks, through `pyflyte run`, in a directory with a run's
    outputs.
    """
    (place / "runs" / "digits").mkdir(parents=True)
    (place / "temporary").mkdir()
    run = subprocess.run(
        [BIN / "pyflyte", "run", REPOSITORY / WORKFLOW[0], WORKFLOW[1]]
        + ["--config", json.dumps(SMALL), "--num_processes", "2"],
        cwd=place,
        env={**os.environ, "WANDB_MODE": "disabled", "TMPDIR": str(place / "temporary")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def test_a_local_run_ends_with_accuracies_and_the_paths_of_its_outputs(local_run, place):
    import torch

    from flyte_ddp.recipes import get_recipe

    assert local_run.stdout == "Running Execution on local.\n"
    *_, accuracies, state, report, history, export = local_run.stderr.splitlines()
    directory = place / "runs" / "digits-2"
    values = json.loads((directory / "outputs.json").read_text())["epoch_accuracies"]
    assert len(values) == 2
    assert values[1] > 0.8
    assert accuracies == f"accuracy per epoch  {values[0]:.2%}  {values[1]:.2%}".replace("%", " %")
    assert [line.split()[-1] for line in (state, report, history, export)] == [
        f"runs/digits-2/{name}"
        for name in ("model_state.pt", "report.html", "history.jsonl", "export")
    ]
    weights = torch.load(directory / "model_state.pt", weights_only=True)
    get_recipe("digits").model().load_state_dict(weights)
    assert "1,437 training and 360 held-out images" in (directory / "report.html").read_text()
    text = (directory / "history.jsonl").read_text()
    kinds = [json.loads(line)["event"] for line in text.splitlines()]
    assert kinds[:3] == ["AttemptStarted", "RunStarted", "CheckpointLoaded"]
    assert kinds.count("EpochFinished") == 2
    assert kinds[-1] == "TimeSpent"
    assert "RunFinished" in kinds[-3:]


class InterruptAfterEpoch(Listener):
    """A listener that presses Ctrl-C after the first epoch."""

    def handle(self, event):
        if isinstance(event, EpochFinished) and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.long
def test_ctrl_c_ends_with_the_step_and_the_command_that_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    flags = [
        "--recipe",
        "tests.support.recipes.Tiny",
        "--num_processes",
        "1",
        "--output",
        str(tmp_path / ("out put")),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(TaskRun, "figures", lambda self, **labels: [InterruptAfterEpoch()])
        code, output = pyflyte_run(*flags)
    assert code == 1
    step = int(re.search(r"SIGINT: the run was stopped at step (\d+)", output)[1])
    assert 9 <= step < 27
    assert "SIGINT: the run was stopped" in (tmp_path / "out put" / "report.html").read_text()
    command = shlex.split(re.search(r"to resume: (.+?/checkpoints-\w+)", output)[1])
    assert command[:2] == ["pyflyte", "run"]
    assert command[4:-2] == flags
    code, output = pyflyte_run(*command[4:])
    assert code == 0
    assert f"resumed at step {step} of 27" in output


def test_a_local_run_leaves_only_its_outputs_and_flytekits_directory(local_run, place):
    left = [*place.iterdir(), *(place / "runs").iterdir(), *(place / "temporary").iterdir()]
    names = sorted(path.name for path in left if not path.name.startswith("flyte"))
    assert names == ["digits", "digits-2", "runs", "temporary"]


def test_the_help_explains_every_flag():
    _, text = pyflyte_run("--help")
    for expected in (
        "what to train: digits, mnist",
        "hyperparameters that differ from the recipe's",
        "0 is one per GPU",
        "by default the recipe's own data",
        "an unfinished run found there resumes",
    ):
        assert expected in text
    assert '"anyOf"' not in text  # no JSON schema


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--recipe", "nope"], "recipe: expected digits, image_folder, mnist"),
        (["--config", '{"epochs": 0}'], "epochs: expected a whole number of at least 1, got 0"),
        (
            ["--config", '{"epochs": "ten"}'],
            "epochs: expected a whole number of at least 1, got 'ten'",
        ),
        (
            ["--config", '{"recipe_options": {"size": 1}}'],
            "expected no options for recipe 'digits', got 'size'",
        ),
        (["--config", '{"epoch": 3}'], "config: expected a known field (did you mean epochs?)"),
        (
            ["--config", '{"global_batch_size": 33}', "--num_processes", "2"],
            "expected a multiple of 2, got 33",
        ),
        (
            ["--checkpoints", "/proc/none"],
            "checkpoints: expected a place that this process may use, got /proc/none",
        ),
        (
            ["--config", "nowhere.yaml"],
            "config: expected a JSON object or the name of a JSON or YAML file",
        ),
        (
            ["--data", "/nowhere"],
            "data: expected a directory, a file or a URL, got '/nowhere', which does not exist",
        ),
        (
            ["--output", "Makefile"],
            "output: expected a directory that this process may write, got 'Makefile': File exists",
        ),
        (["--data", "tests"], "recipe digits uses scikit-learn's own"),
        (["--recipe", "mnist", "--data", "tests"], "tests, which holds no train-images-idx3-ubyte"),
    ],
)
def test_bad_input_is_refused_without_a_traceback(arguments, expected):
    code, output = pyflyte_run(*arguments)
    assert code != 0
    assert expected in output
    assert "Traceback" not in output
    assert "[rank" not in output  # no rank was started


@pytest.mark.parametrize("sender", ["pyflyte", "console"])
def test_a_recipes_options_reach_a_registered_task(sender):
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.models.literals import Literal, Scalar, Union
    from google.protobuf import json_format, struct_pb2

    from flyte_ddp.flyte.inputs import OptionalOverrides, TrainingOverrides, given
    from flyte_ddp.recipes import config_of

    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(OptionalOverrides)
    text = '{"epochs": 3, "recipe_options": {"width": 24, "slope": 1, "sizes": [1, 2]}}'
    if sender == "pyflyte":
        literal = TypeEngine.to_literal(
            context, TrainingOverrides.from_json(text), OptionalOverrides, kind
        )
    else:  # The console's numbers are all floats.
        value = Literal(scalar=Scalar(generic=json_format.Parse(text, struct_pb2.Struct())))
        literal = Literal(scalar=Scalar(union=Union(value, kind.union_type.variants[0])))
    received = given(TypeEngine.to_python_value(context, literal, OptionalOverrides))

    config = config_of("tests.support.recipes.Optional", received)
    options = {"width": 24, "slope": 1.0, "activation": "tanh", "biased": True, "sizes": [1, 2]}
    assert (config.epochs, config.recipe_options) == (3, options)
    assert type(config.recipe_options["width"]) is int


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_a_config_in_json_may_begin_with_a_byte_order_mark(encoding, tmp_path):
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    from flyte_ddp.flyte.failures import InputError
    from flyte_ddp.flyte.inputs import OptionalCluster, OptionalOverrides

    expected = "expected a JSON object or the name of a JSON or YAML"
    context = FlyteContextManager.current_context()
    for kind, values in (
        (OptionalOverrides, {"epochs": 3}),
        (OptionalCluster, {"num_nodes": 3, "kind": "local"}),
    ):
        file = tmp_path / f"{'-'.join(values)}.json"
        file.write_text(json.dumps(values), encoding)
        literal_type = TypeEngine.to_literal_type(kind)
        # `pyflyte run` does this with text that it cannot convert to an object.
        literal = TypeEngine.to_literal(context, str(file), kind, literal_type)
        found = TypeEngine.to_python_value(context, literal, kind)
        assert {name: getattr(found, name) for name in values} == values
        bad = file.with_suffix(".txt")  # flytekit remembers what it has converted
        bad.write_text("{", encoding)
        with pytest.raises(InputError, match=expected):
            TypeEngine.to_literal(context, str(bad), kind, literal_type)


def container_command(directory, attempt, inputs):
    """Return the arguments and the environment of attempt `attempt` of the training task, as Flyte
    lays them out.
    """
    root = f"file://{directory}"
    prefix = f"{directory}/metadata/project-domain-f1/n1/data/{attempt}"
    os.makedirs(prefix, exist_ok=True)
    arguments = [
        *(
            "--inputs",
            inputs,
            "--output-prefix",
            f"file://{prefix}",
            "--raw-output-data-prefix",
            f"{root}/data/s{attempt}/f1-n1-{attempt}",
        ),
        *("--resolver", "flytekit.core.python_auto_container.default_task_resolver", "--"),
        *("task-module", "tasks.train", "task-name", "train_on_one_node"),
    ]
    environment = {
        "FLYTE_INTERNAL_EXECUTION_ID": "f1",
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "project",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "domain",
        "WANDB_MODE": "offline",
        "PYTHONPATH": str(REPOSITORY),
        "STEP_SECONDS": "0.05",
    }
    return arguments, environment, Path(prefix)


def start_pod(directory, attempt, inputs):
    """Start that attempt as a process."""
    arguments, environment, prefix = container_command(directory, attempt, inputs)
    process = subprocess.Popen(
        [BIN / "pyflyte-execute", *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, prefix


def error_of_pod(directory, attempt, inputs, **variables):
    """Run that attempt in this process, and return the error that it leaves for Flyte."""
    from flyteidl.core import errors_pb2

    arguments, environment, prefix = container_command(directory, attempt, inputs)
    _, output, errors = run_command(
        "pyflyte-execute", *arguments, cwd=directory, **environment, **variables
    )
    assert (prefix / "error.pb").exists(), output + errors
    return errors_pb2.ErrorDocument.FromString((prefix / "error.pb").read_bytes()).error


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path, epochs=3)


def write_inputs(tmp_path, **config):
    """Write the task's inputs as Flyte stores them: a slow recipe with a checkpoint every few
    steps.
    """
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.types.directory import FlyteDirectory

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.recipes import config_of, get_recipe
    from flyte_ddp.recipes.prepare import prepare_data

    recipe = "tests.support.recipes.Tiny"
    data = tmp_path / "prepared"
    data.mkdir()
    prepare_data(get_recipe(recipe), "", data)
    values = {
        "recipe": recipe,
        "config": config_of(recipe, {**config, "checkpoint_interval": 2}),
        "data": FlyteDirectory(str(data)),
        "num_processes": 2,
        "checkpoints": "",
    }
    types = {
        "recipe": str,
        "config": TrainingConfig,
        "data": FlyteDirectory,
        "num_processes": int,
        "checkpoints": str,
    }
    context = FlyteContextManager.current_context()
    literals = TypeEngine.dict_to_literal_map(context, values, types)
    file = tmp_path / "inputs.pb"
    file.write_bytes(literals.to_flyte_idl().SerializeToString())
    return str(file)


@pytest.mark.long
def test_a_retry_resumes_from_the_newest_checkpoint_of_any_attempt(tmp_path, inputs, monkeypatch):
    """Attempt 0 is killed in mid-epoch, attempt 1 before it writes anything, and attempt 2 finishes
    the run.
    """
    from flyteidl.core import literals_pb2

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("FLYTE_DDP_METRICS_PORT", str(port))
    first, _ = start_pod(tmp_path, 0, inputs)
    checkpoints = tmp_path / "data/checkpoints/project/domain/f1/n1"
    while len(list(checkpoints.glob("step-*.json"))) < 2 and first.poll() is None:
        time.sleep(0.05)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert re.search(
            rb'^flyte_ddp_step\{recipe="tests.support.recipes.Tiny",run="f1-n1"\} [1-9]',
            answer.read(),
            re.M,
        )
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second, _ = start_pod(tmp_path, 1, inputs)
    second.send_signal(signal.SIGKILL)
    second.communicate()

    third, prefix = start_pod(tmp_path, 2, inputs)
    output, _ = third.communicate()

    assert not (prefix / "error.pb").exists(), output
    outputs = literals_pb2.LiteralMap.FromString((prefix / "outputs.pb").read_bytes())
    accuracies = outputs.literals["epoch_accuracies"].collection.literals
    assert len(accuracies) == 3
    state = outputs.literals["model_state"].scalar.blob.uri.removeprefix("file://")
    assert Path(state).stat().st_size > 0
    assert "resumed" in output
    # The addresses that the task prints at the end can be reached from elsewhere. The files of the
    # offline W&B run can be, too.
    lines = output[output.index("accuracy per epoch") :].splitlines()
    assert f"model state file://{state}" in [" ".join(line.split()) for line in lines]
    assert any(line.startswith("report") and "/report.html" in line for line in lines)
    assert any('"Flyte Deck"' in line for line in lines)
    (archive,) = (checkpoints / "wandb").iterdir()
    assert f"kept at {archive}" in output
    assert f"{tempfile.gettempdir()}/flyte-" not in output.replace(str(tmp_path), "")
    assert "Training" in (prefix / "deck.html").read_text()


@pytest.mark.long
def test_a_run_ends_for_good_when_all_its_attempts_have_taken_max_hours(tmp_path):
    from flyteidl.core import errors_pb2

    checkpoints = tmp_path / "data/checkpoints/project/domain/f1/n1"
    checkpoints.mkdir(parents=True)
    first_start = time.time() - 3600 + 9  # An earlier attempt began at this time.
    (checkpoints / "first-start-f1-n1").write_text(str(first_start))
    inputs = write_inputs(tmp_path, epochs=100_000, max_hours=1.0)
    for attempt, end in (
        (1, r"the (run was stopped|ranks were killed)|nothing was running"),
        (2, "Its checkpoints"),
    ):
        error = error_of_pod(tmp_path, attempt, inputs)
        assert re.search(
            f"max_hours: the run has reached its limit of 1 h, over all attempts.*{end}",
            error.message,
        )
        assert error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
        assert "Traceback" not in error.message


@pytest.mark.long
def test_a_pod_with_another_library_than_registered_is_not_retried(tmp_path, inputs, monkeypatch):
    from flyteidl.core import errors_pb2

    monkeypatch.setenv("FLYTE_DDP_LIBRARY", "flyte_ddp 01234567, torch 1.0")
    process, prefix = start_pod(tmp_path, 0, inputs)
    output, _ = process.communicate()
    assert (prefix / "error.pb").exists(), output
    error = errors_pb2.ErrorDocument.FromString((prefix / "error.pb").read_bytes()).error
    assert error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
    said = "image: expected flyte_ddp 01234567, torch 1.0, as registered, got flyte_ddp "
    assert said in error.message
