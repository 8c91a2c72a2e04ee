"""A run gets the images, accounts, secrets, namespaces and parts of pods that its registered
version allows.
"""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from flytekit import task
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.models.core.types import BlobType
from flytekit.models.literals import Blob, BlobMetadata, Literal, LiteralMap, Scalar
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.__main__ import main
from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig
from flyte_ddp.cluster.kubernetes.manifest import cluster_spec
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import LISTED
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.failures import UserError
from flyte_ddp.flyte.inputs import ClusterInput, TrainingOverrides
from flyte_ddp.flyte.retraining import Retraining
from flyte_ddp.flyte.task import check_cluster, check_config, check_urls, limited_urls
from flyte_ddp.flytekit_plugin import Distributed
from flyte_ddp.project.admission import Allowed, check_allowed
from flyte_ddp.project.settings import load_settings
from flyte_ddp.promotion.policy import PromotionCriteria
from flyte_ddp.storage import check_places
from tasks.retrain import keep_champion
from tasks.script import run_script
from tasks.train import prepare, train_on_one_node

ROOT = Path(__file__).parents[2]
DEFAULTS = load_settings(environment={}).allowed
PRIVILEGED = {"securityContext": {"privileged": True}}
HOST = {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}


def kubernetes(**fields):
    return ClusterConfig(kind="kubernetes", kubernetes=fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"image": "evil:1"},
            "image: expected none, because allowed.images is empty, got 'evil:1'",
        ),
        ({"namespace": "kube-system"}, "namespace: expected none, because .* got 'kube-system'"),
        (
            {"service_account": "admin"},
            (
                r"service_account: expected one of "
                r"allowed.service_accounts \(flyte-ddp\), got"
            ),
        ),
        ({"pod_template": {"imagePullSecrets": [{"name": "other"}]}}, "got imagePullSecrets"),
        ({"env": {"LD_PRELOAD": "x"}}, r"env: expected one of allowed.env .*, got 'LD_PRELOAD'"),
        ({"labels": {"inject-flyte-secrets": "true"}}, r"labels: expected one of .*, got 'inject"),
        ({"annotations": {"flyte.secrets/s0": "m4"}}, r"annotations: expected one of .*'flyte.sec"),
        (
            {"pod_template": {"containers": [{"name": "w", "image": "evil:1"}, {"name": "w"}]}},
            "got containers.w.image",
        ),
        ({"env_from_secrets": ["other"]}, "env_from_secrets: expected none, .* got 'other'"),
        ({"pod_template": HOST}, "pod_template: expected one of .* got volumes.host.hostPath.path"),
        ({"pod_template": {"hostNetwork": True}}, "got hostNetwork"),
        ({"pod_template": {"securityContext": None}}, "got securityContext"),
        (
            {"pod_template": {"containers": [{"name": "worker", **PRIVILEGED}]}},
            "got containers.worker.securityContext",
        ),
        (
            {"pod_template": {"containers": [{"name": "more", "image": "evil:1"}]}},
            "got containers.more.image",
        ),
        ({"pod_template": {"containers": [{"image": "evil:1"}]}}, "got containers"),
        # A name with dots is one part of a path.
        (
            {"pod_template": {"containers": [{"name": "worker.resources", **PRIVILEGED}]}},
            "got containers.worker.res",
        ),
        (
            {"pod_template": {"containers": [{"name": "worker", "env": [{"name": "A"}]}]}},
            "got containers.worker.env",
        ),
        ({"tls": False}, r"tls: expected one of allowed\.tls \(true\), got 'false'"),
        ({"operator_namespace": "mine"}, r"operator_namespace: expected one of .*, got 'mine'"),
        ({"gpu_resource": "smarter-devices/mem"}, r"gpu_resource: expected .*, got 'smarter-"),
        (
            {
                "pod_template": {
                    "containers": [
                        {"name": "worker", "resources": {"limits": {"smarter-devices/mem": 1}}}
                    ]
                }
            },
            "got containers.worker.resources.limits.smarter-devices/mem",
        ),
        (
            {"pod_template": {"tolerations.x": [], "initContainers": []}},
            "got tolerations.x; .* got initContainers",
        ),
    ],
)
def test_forbidden_values_are_named_and_refused(fields, expected):
    with pytest.raises(ConfigError, match=rf"^cluster\.kubernetes\..*{expected}.*settings\.toml"):
        check_allowed(kubernetes(**fields), DEFAULTS, "team")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gpu_resource": "cpu"}, "gpu_resource: expected the name of a device's resource"),
        ({"gpu_resource": "memory"}, "gpu_resource: expected the name of a device's resource"),
        ({"termination_grace": 1e9}, "termination_grace: expected .* at most 86400"),
        ({"idle_timeout": 1e9}, "idle_timeout: expected .* at most 604800"),
        ({"shared_memory": "9Gi"}, r"shared_memory: expected at most worker_memory \(8Gi\)"),
        ({"shared_memory": "8.6G"}, r"shared_memory: expected at most worker_memory \(8Gi\)"),
        *(
            (
                {name: {"terminationGracePeriodSeconds": given}},
                rf"{name}\.terminationGracePeriodSeconds: expected a finite number of at least 10",
            )
            for name in ("pod_template", "scheduler_pod_template")
            for given in (-5, 0, 1e9, "60", True)
        ),
    ],
)
def test_a_value_that_no_pod_can_have_is_refused_in_one_line(fields, expected):
    with pytest.raises(ConfigError, match=rf"^(kubernetes\.)?{expected}[^\n]*$"):
        kubernetes(**fields)


def test_the_grace_of_a_template_counts_for_the_workers():
    def grace(**fields):
        return kubernetes(**fields).kubernetes.worker_grace

    name = "terminationGracePeriodSeconds"
    assert grace(termination_grace=90) == 90
    assert grace(pod_template={name: 120.0}) == 120
    assert grace(pod_template={name: None}) == 30  # Kubernetes' own, which is left


FREE = (
    *("preset", "num_nodes", "gpus_per_node", "processes_per_node", "threads_per_rank"),
    *("min_nodes", "max_restarts", "node_timeout", "start_timeout", "return_timeout", "grow_delay"),
    *("grow_interval", "worker_cpus", "worker_memory", "shared_memory", "scheduler_cpus"),
    *("scheduler_memory", "image_pull_policy", "queue", "idle_timeout", "termination_grace"),
    *("autoscaled_nodes", "check_nodes", "spare_nodes"),
)


def test_every_field_of_a_cluster_is_free_or_compared_with_a_list_of_the_registration():
    """A new field has to be put into one of the two."""
    fields = [*dataclasses.fields(ClusterConfig), *dataclasses.fields(KubernetesConfig)]
    lists = {each.name: each.metadata[LISTED] for each in fields if each.name != "kubernetes"}
    assert {name for name, table in lists.items() if not table} == set(FREE)
    tables = {each.name for each in dataclasses.fields(Allowed)}
    assert {table for table in lists.values() if table} | {"urls"} == tables
    nothing = Allowed(**dict.fromkeys(tables, ()))
    other = {str: "other.example/x", bool: False, dict: {"other": "x"}, list: ["other"]}
    for each in dataclasses.fields(KubernetesConfig):
        if each.metadata[LISTED]:
            value = other[type(getattr(KubernetesConfig(), each.name))]
            with pytest.raises(ConfigError, match=rf"^cluster\.kubernetes\.{each.name}: expected"):
                check_allowed(kubernetes(**{each.name: value}), nothing, "team")


def test_the_defaults_allow_unset_fields_and_the_runs_own_namespace(monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_IMAGE", "registry.example.com/flyte-ddp:7")
    template = {
        "nodeSelector": {"a.b/c": "d"},
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "worker", "resources": {"limits": {"cpu": "2"}}}],
    }
    same = {
        "image": "registry.example.com/flyte-ddp:7",
        "namespace": "team",
        "service_account": "flyte-ddp",
        "env": {"NCCL_DEBUG": "INFO"},
        "labels": {"team": "vision"},
    }
    for fields in ({}, same, {"pod_template": template}):
        check_allowed(kubernetes(**fields), DEFAULTS, "team")
    check_allowed(ClusterConfig(kind="local", kubernetes={"image": "evil:1"}), DEFAULTS)


@pytest.fixture
def pod(monkeypatch, tmp_path):
    """Be in a task that Flyte has started, in a pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    context = FlyteContextManager.current_context()
    prefix = str(tmp_path / "data" / "x" / f"{context.user_space_params.execution_id.name}-n0-0")
    params = context.user_space_params.builder()
    params.raw_output_prefix = params.output_metadata_prefix = prefix
    mode = ExecutionState.Mode.TASK_EXECUTION
    state = context.execution_state.with_params(mode=mode, user_space_params=params.build())
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield


EXISTING = {"kind": "existing", "scheduler_address": "tcp://elsewhere:8786"}
NOT_KUBERNETES = [
    (
        {"kind": "local"},
        (
            r"cluster\.kind: expected one of allowed\.kinds \(kubernetes\) in a pod, "
            r"got 'local'"
        ),
    ),
    (EXISTING, r"cluster\.kind: .* got 'existing'"),
    ({"scheduler_address": "tcp://elsewhere:8786"}, r"cluster\.kind: .* got 'existing'"),
]


@pytest.mark.parametrize(("cluster", "expected"), NOT_KUBERNETES)
def test_in_a_pod_no_launch_has_its_ranks_in_the_drivers_pod_or_at_an_address_of_its_own(
    pod, cluster, expected, monkeypatch
):
    given = ClusterInput(**cluster)
    with pytest.raises(ConfigError, match=f"^{expected} .*settings.toml"):
        check_cluster(given)
    own = task(task_config=Distributed(nnodes=2, cluster=cluster))(train)
    with pytest.raises(UserError, match=expected):
        own.execute()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")  # A laptop has no such variable.
    check_cluster(given)


def train(file: FlyteFile | None = None) -> None:
    raise AssertionError("it was run")


def test_the_address_that_a_launch_puts_into_the_environment_is_compared_too(pod, monkeypatch):
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://elsewhere:8786")
    allowed = Allowed(kinds=("existing",), addresses=("tcp://dask.team:*",))
    with pytest.raises(
        ConfigError,
        match=(
            r"scheduler_address: expected one of .*, got "
            r"'tcp://elsewhere:8786'"
        ),
    ):
        check_allowed(ClusterConfig(), allowed)
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://dask.team:8786")
    check_allowed(ClusterConfig(), allowed)


def test_a_script_of_the_launchers_runs_in_no_drivers_pod(pod, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr("flyte_ddp.flyte.scripts.check_urls", lambda **urls: None)
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=r"cluster\.kind: .*got 'local'"):
        run_script.task_function(
            FlyteFile(str(script)), cluster=ClusterInput(kind="local", num_nodes=1)
        )
    assert not (tmp_path / "ran").exists()


def test_a_task_of_a_users_own_allows_what_it_names_and_what_settings_toml_does(pod, monkeypatch):
    def call(allowed=None, file="s3://bucket/file", **cluster):
        own = task(task_config=Distributed(nnodes=2, cluster=cluster, allowed=allowed))(train)
        literals = LiteralMap(
            {"file": Literal(Scalar(blob=Blob(BlobMetadata(BlobType("", 0)), file)))}
        )
        own.check_allowed(own.task_config.gang(own._pods), literals)

    call()
    call(allowed={"kinds": ["existing"], "addresses": ["tcp://elsewhere:*"]}, **EXISTING)
    with pytest.raises(ConfigError, match=r"^cluster\.kubernetes\.env: expected .*allowed"):
        call(kubernetes={"env": {"LD_PRELOAD": "x"}})
    call(kubernetes={"env": {"LD_PRELOAD": "x"}}, allowed={"env": ["LD_PRELOAD"]})
    # These are the settings of a project without any.
    monkeypatch.setattr("flyte_ddp.project.admission.read_settings", dict)
    call(
        kubernetes={"env": {"NCCL_DEBUG": "INFO"}, "env_from_secrets": ["store"]},
        file="https://example.com/file",
    )
    with pytest.raises(ConfigError, match=r"^cluster\.kind: expected one of allowed\.kinds"):
        call(**EXISTING)
    with pytest.raises(ConfigError, match=r"^file: expected one of allowed\.urls .*'/etc/passwd'"):
        call(file="/etc/passwd")


def test_a_script_on_the_command_line_in_a_pod_obeys_the_same_table(
    pod, tmp_path, capsys, monkeypatch
):
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["run", "--nnodes", "2", "--cluster", '{"kind": "local"}', str(script)]) == 2
    assert (
        "cluster.kind: expected one of allowed.kinds (kubernetes) in a pod, got 'local'"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "ran").exists()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")  # A laptop has no such variable.
    monkeypatch.setattr(
        "flyte_ddp.launch.run_options.run_job", lambda *_, **options: (tmp_path / "ran").touch()
    )
    cluster = '{"kind": "kubernetes", "kubernetes": {"image": "own:1"}}'
    assert main(["run", "--nnodes", "2", "--cluster", cluster, str(script)]) == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "command", [("train", "--checkpoints"), ("predict", "--model-state", "none.pt", "--output")]
)
def test_a_recipe_on_the_command_line_in_a_pod_obeys_the_same_table(pod, command, tmp_path, capsys):
    name, *options = command
    cluster = ["--nnodes", "2", "--cluster", '{"kind": "local"}']
    assert main([name, "digits", *cluster, *options, f"{tmp_path}/made"]) == 2
    assert "cluster.kind: expected one of allowed.kinds" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "url",
    [
        "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "file:///etc/flyte/secrets/wandb/api_key",
        "dask://elsewhere:8786/x",
        "http://169.254.169.254/latest/meta-data",
        "s3://bucket/a::file:///etc/passwd",
    ],
)
def test_a_launch_names_no_file_of_the_pod_and_no_server_of_its_own(pod, url, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    source = FlyteDirectory(url)
    calls = {
        "data": lambda: prepare.task_function(recipe="text", source=source),
        "checkpoints": lambda: train_on_one_node.task_function(
            "digits", TrainingConfig(), source, checkpoints=url
        ),
        "script": lambda: run_script.task_function(source),
        "champion": lambda: keep_champion.task_function(
            Retraining("digits", url, "", PromotionCriteria(), "", "not_better", "")
        ),
        "initial_model_state": lambda: prepare.task_function(
            "digits", TrainingOverrides(initial_model_state=url)
        ),
    }
    for name, call in calls.items():
        with pytest.raises(UserError, match=rf"^{name}: expected one of allowed\.urls .*, got "):
            call()
    with limited_urls(["s3://*"]):
        check_urls(data="s3://bucket/x", checkpoints="")


TEAM = Allowed(
    urls=(
        "s3://bucket/team/*",
        "https://Host.example/data",
        "abfs://c@a.dfs.core.windows.net/team",
        "/mnt/team",
    )
)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://bucket/team",
            "s3://bucket/team/",
            "s3://bucket/team/a/b.csv",
            "s3://bucket/team//a",
            "S3://bucket/team/a",
        ),
        *(
            "s3a://bucket/team/a",
            "https://host.example/data",
            "https://HOST.example:443/data/a?b=c#d",
            "file:///mnt/team/a",
        ),
        *(
            "az://c@a.dfs.core.windows.net/team/a",
            "abfss://c@a.dfs.core.windows.net/team/a",
            "/mnt/team/a",
            "",
        ),
        *("s3://bucket/team/..a/b..c/...", "s3://bucket/team/50% of it"),
    ],
)
def test_a_url_below_an_allowed_one_is_allowed_in_any_spelling(url):
    check_places([("url", url)], TEAM.urls)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://bucket/team/../other",
            "s3://bucket/team/%2e%2e/other",
            "s3://bucket/team/%252E%252e/other",
        ),
        *(
            "s3://bucket/team/..",
            "s3://bucket/team/./../other",
            "s3://bucket/team/./a",
            "s3://bucket/team/a%2f..%2f../other",
        ),
        *(
            "s3://bucket/team\\..\\other",
            "s3://bucket/team/a?/../../other",
            "s3://bucket/team/..;/other",
        ),
        *(
            "s3://bucket/team-secret",
            "s3://bucket/teams/a",
            "s3://bucket//team/a",
            "s3://bucket",
            "s3://bucket/Team/a",
        ),
        *(
            "s3://bucket.evil/team/a",
            "s3://other/bucket/team/a",
            "s3://bucket/te%61m/a",
            "s3://bucket@evil/team/a",
        ),
        *(
            "s3a://bucket/other",
            "S3://bucket/other",
            "gs://bucket/team/a",
            "s3:/bucket/team/a",
            "s3://bucket/team/a\n",
            " s3://b",
        ),
        *(
            "https://host.example:8443/data",
            "https://host.example@evil/data",
            "https://host.example.evil/data",
        ),
        *(
            "https://evil?host.example/data",
            "https://evil#@host.example/data",
            "http://host.example/data",
            "//host.example/data",
        ),
        *(
            "abfs://c@a.evil/team",
            "abfs://d@a.dfs.core.windows.net/team",
            "simplecache::s3://bucket/team/a",
        ),
        *(
            "zip://*.csv::s3://bucket/team/a.zip",
            "s3://bucket/team/a::file:///etc/passwd",
            "github://o:r@main/a",
        ),
        *(
            "/mnt/team/../other",
            "/mnt/teams",
            "mnt/team",
            "file:///etc/passwd",
            "FILE:///etc/passwd",
            "~/x",
            "local:///etc",
        ),
    ],
)
def test_a_url_outside_of_what_is_allowed_is_refused_in_any_spelling(url):
    with pytest.raises(ConfigError, match=r"^url: expected one of allowed\.urls .*, got "):
        check_places([("url", url)], TEAM.urls)


def test_a_recipes_options_name_no_place_that_is_not_allowed(pod):
    options = {
        "tokens": "bpe",
        "prompt": "ROMEO: a/b",
        "pretrained": "s3://bucket/state.pt",
        "steps": [1, 2],
    }
    with limited_urls(DEFAULTS.urls):
        check_config(TrainingConfig(recipe_options=options))
        for value in (
            "http://elsewhere/x",
            "/var/run/secrets/token",
            "file:///etc/passwd",
            "s3://b/../c",
            "filecache::http://e",
        ):
            for given in (value, [value], {"url": value}):
                with pytest.raises(
                    ConfigError,
                    match=(
                        r"^recipe_options\.pretrained.*: expected "
                        r"one of allowed\.urls"
                    ),
                ):
                    check_config(TrainingConfig(recipe_options={**options, "pretrained": given}))
    config = TrainingOverrides(recipe_options={"tokens": "bpe", "pretrained": "http://elsewhere/x"})
    with pytest.raises(
        UserError,
        match=(
            r"^recipe_options\.pretrained: expected one of "
            r"allowed\.urls"
        ),
    ):
        prepare.task_function(recipe="text", config=config)


def test_a_mistake_in_the_table_is_refused_at_registration(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[allowed]\nimage = []\n")
    with pytest.raises(ConfigError, match=r"settings.toml: allowed: expected .* got 'image'"):
        load_settings(file, {})


PODS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", PODS)
def test_every_example_about_pods_is_allowed_by_exactly_its_named_paths(example):
    config = ClusterConfig(kind="kubernetes", **yaml.safe_load(example))
    spec = cluster_spec(config, "ddp-x-00000000")["spec"]
    for template, pod in (
        ("pod_template", spec["worker"]),
        ("scheduler_pod_template", spec["scheduler"]),
    ):
        assert set(getattr(config.kubernetes, template)) <= set(pod["spec"])
        assert "emptyDir" in str(pod["spec"]["volumes"])  # merged, not replaced
    found = re.findall(r"^# allowed\.(\w+): (.*)$", example, re.MULTILINE)
    needed = [(field, name) for field, names in found for name in names.split(", ")]

    for left_out in [None, *needed]:
        more = {field: getattr(DEFAULTS, field) for field, _ in needed}
        for field, name in needed:
            if (field, name) != left_out:
                more[field] = (*more[field], name)
        refused = (
            pytest.raises(ConfigError, match=re.escape(left_out[1])) if left_out else nullcontext()
        )
        with refused:
            check_allowed(config, dataclasses.replace(DEFAULTS, **more))
