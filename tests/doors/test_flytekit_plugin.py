"""Flyte tasks of a user's own with `Distributed`: the cases of flytekit-kf-pytorch's
tests/test_elastic_task.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from flytekit import FlyteContextManager, PodTemplate, Resources, task
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extras.accelerators import T4
from flytekit.tools.translator import get_serializable
from flytekit.types.directory import FlyteDirectory
from kubernetes.client import V1Container, V1PodSpec, V1VolumeMount

from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.distributed import DistributedTask, check_reachable
from flyte_ddp.flyte.failures import TaskFailed
from flyte_ddp.flytekit_plugin import Distributed
from tests.support import distributed_tasks as tasks

SETTINGS = SerializationSettings(
    ImageConfig(Image("default", "image", "tag")), "project", "domain", "version"
)


def template_of(distributed: DistributedTask):
    """The task as it is registered."""
    from collections import OrderedDict

    return get_serializable(OrderedDict(), SETTINGS, distributed).template


@pytest.mark.long
def test_inputs_outputs_decks_and_environment_pass_through_ranks_that_restart(
    tmp_path, capfd, forked_functions
):
    (tmp_path / "input.txt").write_text("hello")
    decks: list[tuple[str, str]] = []
    context = FlyteContextManager.current_context()
    params = context.user_space_params.with_enable_deck(True).build()
    state = context.execution_state.with_params(user_space_params=params)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        message, config, total, read = tasks.train_and_read(
            config=tasks.Config(lr=0.1), text=tasks.FlyteFile(str(tmp_path / "input.txt"))
        )
        decks = [(deck.name, deck.html) for deck in params.decks]

    assert message.splitlines() == [
        *("hello", "seen 0"),
        *("OWN_VARIABLE=own", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "TORCHELASTIC_RESTART_COUNT=1"),
    ]
    assert (config.lr, config.bs, config.name) == (0.1, 64, "distributed")
    assert total == tasks.EXPECTED_SUM
    assert read == "a of rank 0; ['a', 'b']; rank 0"
    assert ("mine", "<b>the Deck of rank 0</b>") in decks
    report = dict(decks)["Training"]
    assert all(
        each in report
        for each in ("finished", "Resumed at step", "Loss", "SIGKILL", "last reported")
    )
    names = [name for name, _ in decks]
    assert {"Input", "Output", "Source Code"} <= {name.title() for name in names}
    shown = capfd.readouterr().err
    assert "these fields of Distributed change nothing: start_method\n" in shown
    assert "restart 1 of at most 1" in shown
    assert "SIGKILL" in shown


@pytest.mark.long
def test_a_bug_is_reported_with_its_rank_and_the_users_frames_alone_and_not_retried(
    forked_functions,
):
    with pytest.raises(TaskFailed) as caught:
        tasks.fail(kind="bug")

    assert isinstance(caught.value, FlyteUserRuntimeException)  # Elastic raises the same type
    assert not isinstance(caught.value, FlyteRecoverableException)
    assert abs(caught.value.timestamp - time.time()) < 600
    # pytest needs the traceback to report an uncaught error.
    assert pytest.ExceptionInfo.from_exception(caught.value).traceback
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == "rank 1 failed: ValueError: expected something else"
    frames = [line for line in lines if line.lstrip().startswith("File ")]
    assert [frame.split('"')[1] for frame in frames] == [tasks.__file__]


@pytest.mark.long
def test_flytes_recoverable_exception_and_its_subclasses_stay_recoverable(forked_functions):
    with pytest.raises(
        FlyteRecoverableException, match="rank 1 failed: .*NotReady: the data is not there yet"
    ) as found:
        tasks.fail(kind="not ready")
    assert found.value.timestamp is not None


@pytest.mark.slow
def test_a_task_is_mapped_and_nested_in_workflows():
    assert tasks.nested(numbers=[3]) == ([9], 4)


MAIN = """
import os
from dataclasses import dataclass
from flytekit import task, workflow
from flyte_ddp.flytekit_plugin import Distributed

@dataclass
class Count:
    value: int

@task(task_config=Distributed(nproc_per_node=2))
def add(count: Count) -> Count:
    return Count(count.value + int(os.environ["WORLD_SIZE"]))

@workflow
def wf(count: Count) -> Count:
    return add(count=count)

if __name__ == "__main__":
    print(wf(count=Count(3)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["python", "pyflyte"])
def test_a_task_without_torch_in_the_file_that_is_run_needs_no_package(tmp_path, way):
    file = tmp_path / "counting.py"
    file.write_text(MAIN)
    commands = {
        "python": [sys.executable, str(file)],
        "pyflyte": [
            Path(sys.executable).with_name("pyflyte"),
            "run",
            str(file),
            "wf",
            "--count",
            '{"value": 3}',
        ],
    }
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        commands[way],
        env=environment,
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Count(value=5)" in done.stdout, done.stdout + done.stderr


def test_an_import_change_turns_an_elastic_task_into_ours():
    kfpytorch = pytest.importorskip("flytekitplugins.kfpytorch")
    elastic, ours = kfpytorch.Elastic, Distributed
    names = [each.name for each in fields(elastic)]
    assert [each.name for each in fields(ours)][: len(names)] == names
    for name in names:
        assert getattr(ours(), name) == getattr(elastic(), name), name

    def train(lr: float) -> float:
        return lr

    def define(Elastic):
        return task(
            task_config=Elastic(
                nnodes=2,
                nproc_per_node=4,
                start_method="spawn",
                monitor_interval=5,
                max_restarts=3,
                rdzv_configs={"timeout": 1200, "join_timeout": 1000},
                increase_shared_mem=True,
                run_policy=kfpytorch.RunPolicy(backoff_limit=2),
            ),
            retries=3,
            requests=Resources(cpu="8", mem="32Gi", gpu="4"),
            limits=Resources(cpu="8", mem="32Gi", gpu="4"),
        )(train)

    with pytest.warns(UserWarning, match="increase_shared_mem"):
        theirs = define(elastic)
    own = define(ours)
    assert own.interface == theirs.interface
    assert own.python_interface.inputs == theirs.python_interface.inputs
    assert own.metadata.retries == theirs.metadata.retries == 3
    assert own.task_config.list_ignored() == ["run_policy"]
    assert own.task_config.gang().cluster_config().start_timeout == 1000
    assert template_of(own).k8s_pod is None  # the driver's pod has no ranks


def test_the_sizes_of_a_task_are_those_of_its_ranks_pods(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")

    @task(
        task_config=Distributed(
            nnodes="2:4", nproc_per_node=4, cluster={"kubernetes": {"worker_memory": "64Gi"}}
        ),
        requests=Resources(cpu="7500m", mem="32Gi"),
        limits=Resources(gpu="4"),
        accelerator=T4,
    )
    def train() -> None: ...

    cluster = train.task_config.gang(train._pods).cluster_config()
    assert (
        cluster.num_nodes,
        cluster.min_nodes,
        cluster.gpus_per_node,
        cluster.processes_per_node,
    ) == (4, 2, 4, 4)
    assert (cluster.kubernetes.worker_cpus, cluster.kubernetes.worker_memory) == (7.5, "64Gi")
    template = template_of(train)
    assert {str(each.name): each.value for each in template.container.resources.requests} == {
        "1": "1",
        "3": "2Gi",
    }
    assert template.extended_resources is None
    assert train._lost_options == ["accelerator"]
    assert cluster.kubernetes.shared_memory == "64Gi"  # all of it, as Elastic gives
    assert template.type == "python-task"


def test_a_pod_with_ranks_has_shared_memory_and_knows_its_gpus():
    def train() -> None: ...

    def template(**options):
        config = Distributed(
            nproc_per_node=2, increase_shared_mem=options.pop("increase_shared_mem", True)
        )
        return template_of(task(task_config=config, **options)(train))

    shared = template(limits=Resources(gpu="2"), environment={"A": "b"})
    assert shared.extended_resources.shared_memory.mount_path == "/dev/shm"
    assert shared.container.env == {"FLYTE_DDP_REQUESTED_GPUS": "2", "A": "b"}
    assert template(increase_shared_mem=False).extended_resources is None
    assert template(shared_memory="1Gi").extended_resources.shared_memory.size_limit == "1Gi"
    mounts = [V1VolumeMount(name="own", mount_path="/dev/shm")]
    own = PodTemplate(V1PodSpec(containers=[V1Container(name="primary", volume_mounts=mounts)]))
    assert template(pod_template=own).extended_resources is None
    sized = task(
        task_config=Distributed(nnodes=2), shared_memory="1Gi", requests=Resources(mem="4Gi")
    )(train)
    assert sized.pod_template is None
    assert sized._pods == {"worker_memory": "4Gi", "shared_memory": "1Gi"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": 0}, "nnodes: expected a number of machines"),
        ({"nnodes": 2, "cluster": {"gpus": 1}}, "gpus"),
        (
            {"nnodes": 2, "cluster": {"num_nodes": 3}},
            "cluster.num_nodes: expected 2, as nnodes has it, got 3",
        ),
        ({"nproc_per_node": "all"}, "nproc_per_node: expected a number of ranks"),
    ],
)
def test_a_mistake_in_a_definition_is_named_before_anything_runs(options, said):
    with pytest.raises(ConfigError) as caught:
        Distributed(**options)
    assert said in str(caught.value)


def test_files_of_this_machine_are_refused_for_ranks_in_pods():
    def train(file: tasks.FlyteFile) -> tasks.FlyteFile:
        return file

    distributed = task(task_config=Distributed(nnodes=2, cluster={"kind": "kubernetes"}))(train)
    context = FlyteContextManager.current_context()
    literals = TypeEngine.dict_to_literal_map(
        context, {"file": tasks.FlyteFile("s3://bucket/file")}
    )
    gang, outputs = distributed.task_config.gang(), distributed.interface.outputs
    check_reachable(gang, distributed._list_urls(literals), outputs, "s3://bucket/raw")
    with pytest.raises(
        ConfigError, match="^raw-output-data-prefix: .* output o0 is a file, got '/tmp/raw'"
    ):
        check_reachable(gang, distributed._list_urls(literals), outputs, "/tmp/raw")
    literals.literals["file"].scalar.blob._uri = "/tmp/file"
    with pytest.raises(
        ConfigError, match="^file: expected a URL that the pods of the ranks can reach"
    ):
        check_reachable(gang, distributed._list_urls(literals), outputs, "s3://bucket/raw")


@dataclass
class Files:
    """An input of a task that contains files."""

    file: tasks.FlyteFile
    by_name: dict[str, FlyteDirectory]
    width: int = 3


@pytest.mark.parametrize("is_listed", [False, True])
def test_files_in_a_dataclass_are_checked_as_other_files_are(is_listed, monkeypatch):
    def train(files: Files) -> None: ...
    def train_listed(files: list[Files]) -> None: ...

    config = Distributed(allowed={"urls": ["s3://bucket/*"]})
    distributed = task(task_config=config)(train_listed if is_listed else train)
    context = FlyteContextManager.current_context()
    monkeypatch.setattr("flyte_ddp.flyte.distributed.is_flyte_task", lambda: True)

    def check(file, directory):
        files = Files(tasks.FlyteFile(file, remote_path=False), {"a": FlyteDirectory(directory)})
        kinds = distributed.python_interface.inputs
        literals = TypeEngine.dict_to_literal_map(
            context, {"files": [files] if is_listed else files}, kinds
        )
        distributed.check_allowed(config.gang(), literals)

    check("s3://bucket/file", "s3://bucket/directory")
    for places in (("/etc/passwd", "s3://bucket/d"), ("s3://bucket/f", "s3://other/d")):
        with pytest.raises(ConfigError, match="^files: expected one of allowed.urls"):
            check(*places)
