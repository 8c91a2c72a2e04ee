"""A run gets the images, accounts, secrets, namespaces and parts of pods that its registered version allows."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from flyte_ddp.cluster.admission import Allowed, check_allowed
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.manifest import PLURAL, cluster_spec
from flyte_ddp.errors import ConfigError
from tasks.inputs import ClusterInput
from tasks.settings import ROOT, SettingsError, load_settings

DEFAULTS = load_settings(environment={}).allowed
PRIVILEGED = {"securityContext": {"privileged": True}}
HOST = {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}


def kubernetes(**fields):
    return ClusterConfig(kind="kubernetes", kubernetes=fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"image": "evil:1"}, "image: expected none, because allowed.images is empty, got 'evil:1'"),
        ({"namespace": "kube-system"}, "namespace: expected none, because .* got 'kube-system'"),
        ({"service_account": "admin"}, r"service_account: expected one of allowed.service_accounts \(flyte-ddp\), got"),
        ({"image_pull_secrets": ["other"]}, "image_pull_secrets: expected none, .* got 'other'"),
        ({"env_from_secrets": ["other"]}, "env_from_secrets: expected none, .* got 'other'"),
        ({"pod_template": HOST}, "pod_template: expected one of .* got volumes.host.hostPath.path"),
        ({"pod_template": {"hostNetwork": True}}, "got hostNetwork"),
        ({"pod_template": {"securityContext": None}}, "got securityContext"),
        ({"pod_template": {"containers": [{"name": "worker", **PRIVILEGED}]}}, "got containers.worker.securityContext"),
        ({"pod_template": {"containers": [{"name": "more", "image": "evil:1"}]}}, "got containers.more.image"),
        ({"pod_template": {"containers": [{"image": "evil:1"}]}}, "got containers"),
        # A name with dots is one part of a path.
        ({"pod_template": {"containers": [{"name": "worker.resources", **PRIVILEGED}]}}, "got containers.worker.res"),
        ({"pod_template": {"containers": [{"name": "worker", "env": [{"name": "A"}]}]}}, "got containers.worker.env"),
        ({"pod_template": {"tolerations.x": [], "initContainers": []}}, "got tolerations.x; .* got initContainers"),
    ],
)
def test_forbidden_values_are_named_and_refused(fields, expected):
    with pytest.raises(ConfigError, match=rf"^cluster\.kubernetes\..*{expected}.*settings\.toml"):
        check_allowed(kubernetes(**fields), DEFAULTS, "team")


def test_the_defaults_allow_unset_fields_and_the_runs_own_namespace(monkeypatch):
    monkeypatch.setenv("FLYTE_INTERNAL_IMAGE", "registry.example.com/flyte-ddp:7")
    template = {
        "nodeSelector": {"a.b/c": "d"},
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "worker", "resources": {"limits": {"cpu": "2"}}}],
    }
    same = {"image": "registry.example.com/flyte-ddp:7", "namespace": "team", "service_account": "flyte-ddp"}
    for fields in ({}, same, {"pod_template": template}):
        check_allowed(kubernetes(**fields), DEFAULTS, "team")
    check_allowed(ClusterConfig(kind="local", kubernetes={"image": "evil:1"}), DEFAULTS)


def test_a_pattern_allows_what_it_matches_and_no_more():
    allowed = Allowed(images=("registry.example.com/*",), secrets=("storage",), pod_template=("volumes.data",))
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    fields = {
        "image": "registry.example.com/a:1",
        "env_from_secrets": ["storage"],
        "pod_template": {"volumes": volumes},
    }
    check_allowed(kubernetes(**fields), allowed)
    check_allowed(kubernetes(pod_template={**HOST, "hostPID": True}), Allowed(pod_template=("*",)))
    for wrong in (
        {"image": "registry.example.com.evil/a:1"},
        {"env_from_secrets": ["storage2"]},
        {"pod_template": HOST},
    ):
        with pytest.raises(ConfigError):
            check_allowed(kubernetes(**{**fields, **wrong}), allowed)


def test_a_task_refuses_it_before_it_reads_any_data():
    from tasks.prepare import prepare

    cluster = ClusterInput(kind="kubernetes", kubernetes={"image": "evil:1"})
    with pytest.raises(Exception, match=r"cluster\.kubernetes\.image: expected none"):
        prepare(recipe="digits", cluster=cluster)


def test_a_mistake_in_the_table_is_refused_at_registration(tmp_path):
    file = tmp_path / "settings.toml"
    text = (ROOT / "settings.toml").read_text()
    for old, new, expected in (
        ("images = []", "image = []", "settings.toml: allowed: expected images, .* got 'image'"),
        ("images = []", 'images = "*"', r"allowed: images: expected a list of texts, got '\*'"),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(SettingsError, match=expected):
            load_settings(file, {})


POLICY, BINDING = yaml.safe_load_all((ROOT / "deploy" / "admission-policy.yaml").read_text())


def test_the_admission_policy_of_deploy_uses_the_lists_that_it_declares_and_is_bound():
    rules = [rule["expression"] for rule in [*POLICY["spec"]["validations"], *POLICY["spec"]["variables"]]]
    used = set(re.findall(r"variables\.(\w+)", " ".join(rules)))
    assert used == {variable["name"] for variable in POLICY["spec"]["variables"]}
    assert PLURAL in POLICY["spec"]["matchConstraints"]["resourceRules"][0]["resources"]
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]
    assert BINDING["spec"]["validationActions"] == ["Deny"]


def refusals(manifest, kind="DaskCluster", user="system:serviceaccount:team:flyte-ddp"):
    """Return the messages of the policy's rules that refuse `manifest`, evaluated as the API server would."""
    cel = pytest.importorskip("cel")  # for Python 3.11 and newer
    given = {"object": manifest, "request": {"kind": {"kind": kind}, "userInfo": {"username": user}}, "variables": {}}
    for variable in POLICY["spec"]["variables"]:
        given["variables"][variable["name"]] = cel.evaluate(variable["expression"], given)
    return [each["message"] for each in POLICY["spec"]["validations"] if not cel.evaluate(each["expression"], given)]


def run(name="ddp-x-00000000", **fields):
    """The DaskCluster of a run with what the policy's lists allow, and `fields`."""
    allowed = {
        "image": "registry.example.com/flyte-ddp:7",
        "service_account": "flyte-ddp",
        "env_from_secrets": ["storage"],
        "image_pull_secrets": ["registry"],
    }
    return cluster_spec(ClusterConfig(kind="kubernetes", kubernetes={**allowed, **fields}), name)


def with_pod(**fields):
    """A run whose workers' pod specification was changed by hand."""
    manifest = run()
    manifest["spec"]["worker"]["spec"].update(fields)
    return manifest


INIT = {"name": "i", "image": "registry.example.com/flyte-ddp:7"}
TOKEN = {"name": "e", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api_key"}}}


@pytest.mark.parametrize("fields", [{}, {"tls": False}, {"image": "registry.example.com/flyte-ddp@sha256:0"}])
def test_the_admission_policy_admits_the_runs_of_this_package(fields):
    assert refusals(run(**fields)) == []


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (run(image="evil:1"), "an image"),
        (run(image="registry.example.com/flyte-ddp-evil:1"), "an image"),
        (with_pod(initContainers=[{**INIT, "image": "evil"}]), "an image"),
        (run(service_account="admin"), "a service account"),
        (with_pod(serviceAccount="admin"), "a service account"),  # the deprecated name of the same field
        (with_pod(automountServiceAccountToken=True), "automountServiceAccountToken"),
        (run(env_from_secrets=["wandb"]), "a secret in the environment"),
        (with_pod(initContainers=[{**INIT, "env": [TOKEN]}]), "a secret in the environment"),
        (run(image_pull_secrets=["other"]), "a secret in a volume"),
        (with_pod(volumes=[{"name": "v", "secret": {"secretName": "wandb"}}]), "a secret in a volume"),
        (run("wandb"), "a secret in a volume"),  # a cluster named after the secret that it mounts
        (with_pod(**HOST), "a volume"),
        (with_pod(volumes=[{"name": "v", "projected": {"sources": []}}]), "a volume"),
        (with_pod(hostNetwork=True), "a pod with the node's"),
        (with_pod(initContainers=[{**INIT, **PRIVILEGED}]), "a pod with the node's"),
    ],
)
def test_the_admission_policy_refuses_what_is_in_no_list(manifest, message):
    (refusal,) = refusals(manifest)
    assert refusal.startswith(message)


def test_the_admission_policy_leaves_what_else_makes_pods_to_the_operator():
    group = {"metadata": {"name": "x"}, "spec": {"worker": {"spec": {"hostPID": True}}}}
    assert refusals(group, "DaskWorkerGroup") == ["only the operator creates DaskWorkerGroups and DaskJobs"]
    assert refusals(group, "DaskWorkerGroup", "system:serviceaccount:dask-operator:dask-operator") == []
    assert refusals({"type": "kubernetes.io/tls"}, "Secret") == refusals({}, "Secret") == []
    assert refusals({"type": "kubernetes.io/service-account-token"}, "Secret") == [
        "a secret with a service account's token"
    ]


PODS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "pods.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", PODS)
def test_every_example_about_pods_is_allowed_by_exactly_its_named_paths(example):
    config = ClusterConfig(kind="kubernetes", **yaml.safe_load(example))
    spec = cluster_spec(config, "ddp-x-00000000")["spec"]
    for template, pod in (("pod_template", spec["worker"]), ("scheduler_pod_template", spec["scheduler"])):
        assert set(getattr(config.kubernetes, template)) <= set(pod["spec"])
        assert "emptyDir" in str(pod["spec"]["volumes"])  # merged, not replaced
    needed = re.findall(r"^# allowed.pod_template: (.*)$", example, re.MULTILINE)
    needed = tuple(needed[0].split(", ")) if needed else ()
    for left_out in needed:
        rest = tuple(path for path in needed if path != left_out)
        with pytest.raises(ConfigError, match=re.escape(left_out)):
            check_allowed(config, dataclasses.replace(DEFAULTS, pod_template=(*DEFAULTS.pod_template, *rest)))
    check_allowed(config, dataclasses.replace(DEFAULTS, pod_template=(*DEFAULTS.pod_template, *needed)))
