"""The library in tasks of Flyte 2. For these tests Flyte 2's SDK is installed beside it, and
flytekit is not.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors.test_new_project import PROJECT, installed, link, run, with_dependencies  # noqa: F401
from tests.support.checkout import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="one Python is enough"),
]

VERSION = "2.12.1"
LOST = """
import os
import flyte
from flyte_ddp import flyte2, session

env = flyte2.environment("lost", flyte2.SETTINGS.small, flyte2.Distributed())

@env.task(retries=1)
def lose_a_rank() -> list[int]:
    state = session.load() or {"step": 0, "starts": []}
    state["starts"].append(state["step"])
    for step in range(state["step"] + 1, 7):
        session.report(step=step)
        session.save({**state, "step": step}, step)
        if step == 4 and len(state["starts"]) == 1:
            session.current().saver.wait()
            os.kill(os.getpid(), 9)
    return state["starts"]

flyte.init()
print("resumed", flyte.run(lose_a_rank).outputs().o0)
"""

RECIPE = """
import glob, os, time
from flyte_ddp.recipes.digits import Digits

class Lost(Digits):
    num_batches = 0

    def losses(self, outputs, targets):
        from flyte_ddp import session

        Lost.num_batches += 1
        if Lost.num_batches == 60 and not os.path.exists("lost"):  # in the second epoch or later, once
            while not glob.glob(session.checkpoints + "/step-*.json"):
                time.sleep(0.05)
            open("lost", "w").close()
            os.kill(os.getpid(), 9)
        return super().losses(outputs, targets)
"""  # noqa: E501
LOST_RECIPE = """
import flyte
from flyte_ddp import flyte2

env = flyte2.environment("lost", flyte2.SETTINGS.small)

@env.task(retries=1, report=True)
def lose_a_rank() -> list[int]:
    print("report", flyte.ctx().output_path + "/report.html")
    config = {"epochs": 3, "global_batch_size": 64}
    trained = flyte2.train("mine.Lost", config, num_processes=2)
    return list(range(len(trained.epoch_accuracies)))

flyte.init()
print("epochs", flyte.run(lose_a_rank).outputs().o0)
"""


@pytest.fixture(scope="module")
def packages(installed, tmp_path_factory):  # noqa: F811
    """Directories with the library, what it needs but for flytekit, and the SDK."""
    place, sdk = tmp_path_factory.mktemp("core"), tmp_path_factory.mktemp("sdk")
    needed = [each for each in PROJECT["dependencies"] if not each.startswith("flytekit")]
    link(
        place,
        with_dependencies([*needed, *PROJECT["optional-dependencies"]["digits"]]) - {"flyteidl"},
        installed,
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(sdk),
        f"flyte=={VERSION}",
    ]
    subprocess.run(command, check=True, timeout=300)
    return [sdk, place]


def test_a_recipe_and_a_function_train_without_flytekit(packages, tmp_path):
    output = run(packages, "-S", str(REPOSITORY / "examples/tasks/flyte2.py"), cwd=tmp_path)
    lines = [line for line in output.splitlines() if line.startswith("ActionOutputs")]
    assert lines[0] == "ActionOutputs(o0=15.0)"
    assert ["model_state.pt" in line for line in lines] == [False, True, True]
    # The first run had one machine, and the second one had two nodes.
    assert lines[1].partition("o2=")[0] == lines[2].partition("o2=")[0]
    run(packages, "-S", "-c", "import flytekit", cwd=tmp_path, status=1)


def test_a_retry_of_flyte_2_goes_on_from_the_last_checkpoint(packages, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    output = run(packages, "-S", "lost.py", cwd=tmp_path)
    assert "resumed [0, 4]" in output


def test_a_lost_rank_of_a_recipe_goes_on_and_its_report_is_the_tasks(packages, tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "lost.py").write_text(LOST_RECIPE)
    output = run([*packages, tmp_path], "-S", "lost.py", cwd=tmp_path)
    assert "epochs [0, 1, 2]" in output
    (resumed,) = re.findall(r"resumed at step (\d+) of 69", output)
    assert int(resumed) >= 23  # an epoch's steps
    page = Path(re.findall(r"report (\S+/report\.html)", output)[-1]).read_text()
    assert "mine.Lost" in page
    assert ">finished<" in page
    assert "accuracy" in page


def test_the_rest_of_the_library_neither_imports_nor_needs_the_sdk(packages, tmp_path):
    program = """
import importlib, importlib.util, pkgutil, re, sys
import flyte_ddp

assert importlib.util.find_spec("flyte")
for module in pkgutil.walk_packages(flyte_ddp.__path__, "flyte_ddp."):
    if not re.search("__main__$|[.](integrations|flyte2)[.]", module.name):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.startswith(("flytekit", "flyteidl")), error
assert "flyte_ddp.launch.train" in sys.modules and "flyte_ddp.flyte2" in sys.modules
print([name for name in sys.modules if re.match("flyte(idl2)?([.]|$)", name)])
"""
    assert run(packages, "-S", "-c", program, cwd=tmp_path) == "[]\n"
    assert "flyte" not in with_dependencies(PROJECT["dependencies"])


def test_the_inputs_of_a_schedule_in_the_settings_fit_the_task(packages, tmp_path):
    """As `flyte deploy` converts them; its dry run does not."""
    program = """
import asyncio
from flyte._internal.runtime.trigger_serde import to_task_trigger
from flyte._internal.runtime.types_serde import transform_native_to_typed_interface
from workflows.flyte2 import retrain

inputs = transform_native_to_typed_interface(retrain.native_interface).inputs
(trigger,) = retrain.triggers
made = asyncio.run(to_task_trigger(trigger, retrain.name, inputs, []))
print(sorted(each.name for each in made.spec.inputs.literals))
# Flyte 2.0.43 starts a run with no other input than a trigger's time if it has one
print(made.automation_spec.schedule.kickoff_time_input_arg or "no time")
# and tells one with a pod template another time
print(retrain.pod_template or "no template")
"""
    (tmp_path / "workflows").mkdir()
    shutil.copy(REPOSITORY / "examples/project/flyte2/workflows/flyte2.py", tmp_path / "workflows")
    shutil.copy(REPOSITORY / "settings.toml", tmp_path)
    given = {"recipe": "wine", "config": {"epochs": 5}, "margin": 0.1, "num_processes": 2}
    path = [*packages, tmp_path]
    done = run(path, "-S", "-c", program, cwd=tmp_path, RETRAIN_INPUTS=json.dumps(given))
    assert done == f"{sorted(given)}\nno time\nno template\n"


PLANS = """
import json
from pathlib import Path
import flyte
from flyte_ddp import flyte2

env = flyte.TaskEnvironment("plans")

@env.task
def plan() -> str:
    config = {"initial_model_state": "state.pt"}
    return flyte2.plan_retraining(None, "champions", "digits", config).config

flyte.init()
for contents in (b"weights", b"others"):
    Path("state.pt").write_bytes(contents)
    print("starts from", json.loads(flyte.run(plan).outputs().o0)["initial_model_state"])
"""


def test_a_retraining_starts_from_the_weights_that_it_planned_with(packages, tmp_path):
    """A file that was replaced under its name is another initial state."""
    (tmp_path / "plans.py").write_text(PLANS)
    output = run(packages, "-S", "plans.py", cwd=tmp_path)
    digests = [hashlib.sha256(contents).hexdigest() for contents in (b"weights", b"others")]
    assert re.findall(r"starts from (.*)", output) == [
        f"{tmp_path}/state.pt (sha256 {digest})" for digest in digests
    ]


FETCHES = """
import json
from pathlib import Path
import flyte
from flyte_ddp import flyte2
from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.recipes.digits import Digits

class Changing(Digits):
    # data that are others each time
    def prepare(self, source, directory):
        number = len(list(Path(source).iterdir()))
        Path(source, str(number)).touch()
        (directory / "number").write_text(str(number))
        return super().prepare("", directory)

    def datasets(self, directory):
        print("trains on", (directory / "number").read_text(), flush=True)
        return super().datasets(directory)

env = flyte2.environment("fetches", flyte2.SETTINGS.small)

@env.task
def plan() -> flyte2.Retraining:
    config = {"epochs": 1, "global_batch_size": 64}
    return flyte2.plan_retraining(None, "champions", "fetches.Changing", config, "fetched")

@env.task
def challenge(retraining: flyte2.Retraining) -> flyte2.RetrainingOutputs:
    return flyte2.challenge(retraining, num_processes=1)

if __name__ == "__main__":
    Path("fetched").mkdir()
    flyte.init()
    import fetches
    for _ in range(2):
        planned = flyte.run(fetches.plan).outputs().o0
        champion, export, *_ = flyte.run(fetches.challenge, planned).outputs()
        print("champion is now", champion)
        print("fetched", len(list(Path("fetched").iterdir())))
        card = json.loads(Path(export, "run_card.json").read_text())
        print("replaces", card["origin"]["parent_champion"])
"""


def test_a_retraining_records_the_data_that_it_trained_on(packages, tmp_path):
    (tmp_path / "fetches.py").write_text(FETCHES)
    output = run(packages, "-S", "fetches.py", cwd=tmp_path)
    # The plan fetches the data, and so does the task that trains and judges.
    assert re.findall(r"fetched (\d+)", output) == ["2", "4"]
    assert re.findall(r"trains on (\d+)", output)[-1] == "3"
    # The card of a challenger names the version that it is to replace.
    first, _ = re.findall(r"champion is now (.+)", output)
    assert re.findall(r"replaces (.+)", output) == ["None", first]


PREDICTIONS = """
import glob
import flyte, torch
from flyte_ddp import flyte2
from flyte_ddp.recipes import get_recipe

env = flyte2.environment("predictions", flyte2.SETTINGS.small)

@env.task
def predict() -> flyte2.PredictionOutputs:
    print("report", flyte.ctx().output_path + "/report.html")
    return flyte2.predict("digits", "state.pt", num_processes=1)

flyte.init()
torch.save(get_recipe("digits").model().state_dict(), "state.pt")
num_rows, directory = flyte.run(predict).outputs()
print("predicted", num_rows, len(glob.glob(directory.path + "/*.parquet")))
"""


def test_predictions_have_outputs_and_no_report(all_packages, tmp_path):
    (tmp_path / "predictions.py").write_text(PREDICTIONS)
    output = run(all_packages, "-S", "predictions.py", cwd=tmp_path)
    assert "360 predictions in " in output
    assert "predicted 360 1\n" in output
    assert not Path(*re.findall(r"report (\S+/report\.html)", output)).exists()


TWINS = """
import json
import os
from pathlib import Path
import flyte
from flyte_ddp import flyte2
from flyte_ddp.flyte2.task import current_execution
from flyte_ddp.promotion.champion import LAST_RUN, ChampionStore

env = flyte2.environment("twins", flyte2.SETTINGS.small)

@env.task
def sweep() -> flyte2.SweepOutputs:
    grid = {"learning_rate": [0.01, 0.1]}
    return flyte2.sweep("lines.Lines", grid, {"recipe_options": {"slope": 2.0}})

@env.task
def train() -> flyte2.TrainingOutputs:
    return flyte2.train("lines.Lines", {"recipe_options": {"slope": 2.0}}, num_processes=1)

@env.task
def predict(state: str) -> flyte2.PredictionOutputs:
    return flyte2.predict("lines.Lines", state, num_processes=1)

@env.task
def retrain() -> flyte2.RetrainingOutputs:
    config = {"recipe_options": {"slope": 2.0}}
    planned = flyte2.plan_retraining(None, "champion", "lines.Lines", config)
    return flyte2.challenge(planned, num_processes=1)

@env.task
def count() -> int:
    os.environ["FLYTE_ATTEMPT_NUMBER"] = "2"  # as in a pod
    return current_execution().attempt

flyte.init()
accuracies, config, metrics, *_ = flyte.run(sweep).outputs()
print("sweep", accuracies, sorted(metrics))
*_, export, history, model_state = flyte.run(train).outputs()
card = json.loads(Path(export.path, "run_card.json").read_text())
print("origin", sorted(card["origin"]), len(card["origin"]["code_version"]))
# The file lies beside the run card, which has the option that the call leaves out.
print("predicted", flyte.run(predict, model_state.path).outputs()[0])
print("retrained", flyte.run(retrain).outputs()[3])
(manifest,) = ChampionStore("champion").versions()
last_run = json.loads(Path("champion", LAST_RUN).read_text())
print("execution", [manifest.execution, last_run["execution"]])
print("attempt", flyte.run(count).outputs()[0])
"""
LINES = """
import dataclasses
from typing import ClassVar

import torch
from flyte_ddp.recipes.problems import Regression


@dataclasses.dataclass
class Lines(Regression):
    defaults: ClassVar = {"epochs": 1, "global_batch_size": 32}
    slope: float

    def prepare(self, source, directory):
        return "a line"

    def datasets(self, directory):
        x = torch.linspace(0, 1, 96)[:, None]
        data = torch.utils.data.TensorDataset(x, self.slope * x)
        return torch.utils.data.random_split(data, [64, 32], torch.Generator().manual_seed(0))

    def model(self):
        return torch.nn.Linear(1, 1)
"""


@pytest.fixture(scope="module")
def all_packages(packages, tmp_path_factory):
    """`packages` with what sweeps, metrics and predictions need besides."""
    place, extras = tmp_path_factory.mktemp("extras"), PROJECT["optional-dependencies"]
    empty = tmp_path_factory.mktemp("empty")
    link(place, with_dependencies([*extras["sweep"], *extras["metrics"]]), empty)
    return [*packages, place]


def test_sweeps_cards_and_predictions_are_those_of_the_other_door(all_packages, tmp_path):
    """A recipe without an accuracy, with an option that has no default."""
    (tmp_path / "lines.py").write_text(LINES)
    (tmp_path / "twins.py").write_text(TWINS)
    output = run([*all_packages, tmp_path], "-S", "twins.py", cwd=tmp_path)
    said = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    assert said["sweep"].startswith("[] ['")
    assert "'test_loss'" in said["sweep"]
    assert "'code_version'" in said["origin"]
    assert said["origin"].endswith(" 16")
    assert said["predicted"] == "32"
    assert said["retrained"] == "promoted"
    assert said["execution"] == "['', '']"
    assert said["attempt"] == "2"


MISTAKES = """
import dataclasses
import flyte
from flyte.io import Dir, File
from flyte_ddp import flyte2

def tell(call):
    try:
        call()
    except Exception as error:
        print("said", type(error).__name__, str(error).replace(chr(10), "|"))

SIZE = flyte2.SETTINGS.small
plain = flyte.TaskEnvironment("plain")

@plain.task
def outside() -> str:
    flyte2.train("digits")
    return ""

env = flyte2.environment("env", SIZE)

@env.task
def elsewhere() -> str:
    import flyte_ddp.flyte2.task as task
    task.is_local = lambda: False  # as in a pod
    flyte2.train("digits", data="ftp://else/where")
    return ""

@env.task
def other_champion() -> str:
    from flyte_ddp.promotion.policy import PromotionCriteria
    place = "ftp://else/where"
    facts = ("", PromotionCriteria(), "2026-01-01", "", "", "{}", "")
    flyte2.challenge(flyte2.Retraining("digits", place, *facts))
    return ""

@env.task(retries=1)
def late() -> str:
    import time, flyte_ddp.flyte2.task as task
    from flyte_ddp.observers.reports.run import Report
    try:
        with task.open_task_run(Report(), max_hours=0.3 / 3600):
            raise flyte.errors.RuntimeUserError("Lost", "again")
    finally:
        time.sleep(0.4)

@dataclasses.dataclass
class Files:
    by_name: dict[str, list[File]]

FILES = Files({"first": [File(path="s3://bucket/file"), File(path="/etc/passwd")]})
ranks = flyte2.environment("ranks", SIZE, flyte2.Distributed())
pods = {"cluster": {"kind": "kubernetes"}}
in_pods = flyte2.environment("pods", SIZE, flyte2.Distributed(nnodes=2, **pods))

@ranks.task
def read(files: Files) -> int:
    return len(files.by_name)

@in_pods.task
def read_in_pods(directory: Dir) -> int:
    return 0

@in_pods.task
def write_in_pods(directory: Dir) -> list[File]:
    return []

@in_pods.task(pod_template="ours")
def placed() -> int:
    return 0

key = flyte.Secret("key", as_env_var="KEY")
with_key = flyte2.environment("key", SIZE, flyte2.Distributed(nnodes=2, **pods), secrets=[key])

@with_key.task
def keyed() -> int:
    return 0

def read_in_a_pod():
    import flyte_ddp.flyte2.distributed as distributed
    here, distributed.is_local = distributed.is_local, lambda: False
    try:
        flyte.run(read, files=FILES)
    finally:
        distributed.is_local = here

async def later() -> None: ...

def in_a_task(name, call):
    @env.task
    def refused() -> str:
        call()
        return ""
    return lambda: flyte.run(refused)

SWEEPS = [{"sampler": "tpe"}, {"grid": [1]}, {"cluster": [1]}, {"config": [1]}]
flyte.init()
for number, changes in enumerate(SWEEPS):
    given = {"recipe": "digits", "grid": {"momentum": [0.1]}, **changes}
    tell(in_a_task(f"sweep{number}", lambda: flyte2.sweep(**given)))
tell(in_a_task("predict", lambda: flyte2.predict("digits", "missing.pt", config=[1])))
tell(lambda: flyte.run(late))
tell(lambda: flyte2.train("digits"))
tell(lambda: flyte2.environment("other", SIZE, object()))
tell(lambda: env.task(later))
print("read", flyte.run(read, files=FILES).outputs().o0)
lost = [each.lost_options for each in (placed, keyed, read_in_pods, read)]
print("lost", *lost)
tell(read_in_a_pod)
tell(lambda: flyte.run(read_in_pods, directory=Dir(path="/tmp/files")))
tell(lambda: flyte.run(write_in_pods, directory=Dir(path="s3://bucket/files")))
tell(lambda: flyte.run(elsewhere))
tell(lambda: flyte.run(other_champion))
tell(lambda: flyte.run(outside))
"""


def test_mistakes_are_one_line_each(packages, tmp_path):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    output = run(packages, "-S", "mistakes.py", cwd=tmp_path)
    said = [line for line in output.splitlines() if line.startswith("said ")]
    wanted = (
        "num_models: expected a whole number of at least 1 and of at most",
        'grid: expected a JSON object such as {"learning_rate": [0.001, 0.01]}',
        "cluster: expected fields with their values, got [1]",
        "config: expected fields with their values, got [1]",
        "config: expected fields with their values, got [1]",
        "max_hours: the run has reached its limit of 8.33333e-05 h, over all attempts",
        "ConfigError task: expected a call in a task of Flyte 2, got one outside of any",
        "ConfigError config: expected flyte_ddp.flyte2.Distributed, got builtins.object",
        "ConfigError env.later: expected a function that is not async",
        "https://*), got '/etc/passwd'",
        "directory: expected a URL that the pods of the ranks can reach, got '/tmp/files'",
        "raw-data-path: expected a URL that the pods of the ranks can reach, because output o0",
        "data: expected one of allowed.urls",
        "champion: expected one of allowed.urls",
        "env: expected a task of flyte_ddp.flyte2.environment, which runs on the main thread",
    )
    assert "lost ['pod_template'] ['secrets'] [] ()\n" in output
    assert "read 1\n" in output  # a run of one's own may read any file
    assert len(said) == len(wanted)
    for text, line in zip(wanted, said, strict=True):
        assert text in line
    program = "import flyte_ddp.flyte2 as f; f.train"
    output = run(packages[1:], "-S", "-c", program, cwd=tmp_path, status=1)
    assert "flyte: expected the SDK of Flyte 2, 2.12 or newer, got none: pip install" in output


def test_the_installs_of_the_page_and_of_a_project_find_versions_that_go_together(wheel, tmp_path):
    (line,) = re.findall(
        r"^pip install (.*)$", (REPOSITORY / "docs/flyte2.md").read_text(), re.MULTILINE
    )
    uv = shutil.which("uv") or str(REPOSITORY / ".uv/bin/uv")
    subprocess.run(
        [uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "v")],
        check=True,
        timeout=60,
    )
    command = [uv, "pip", "install", "--dry-run", "--python", str(tmp_path / "v/bin/python")]
    arguments = [each.replace("$(ls flyte_ddp-*.whl)", str(wheel)) for each in shlex.split(line)]
    project = REPOSITORY / "examples/project/flyte2/pyproject.toml"
    # A project's Makefile and Dockerfile install in the same way.
    pinned = ["-c", str(REPOSITORY / "requirements.txt"), "-r", str(project)]
    for given in (arguments, pinned):
        done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert f" + flyte=={VERSION}" in done.stderr
        assert (" + flyte-ddp @ file:" in done.stderr) == (given is arguments)
