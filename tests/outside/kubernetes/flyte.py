"""Flyte's part in tests: packaged tasks, and the pods that it would start for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import LiteralMap
from flyteidl.core.tasks_pb2 import TaskTemplate
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from google.protobuf.json_format import MessageToDict

from tests.outside.kubernetes.conftest import IMAGE, Namespace, apply
from tests.outside.kubernetes.store import Store

PROJECT, DOMAIN = "flytesnacks", "development"
# a node two levels down, as Flyte's metadata prefix has it; a top-level one is n1/data
NESTED = "n2/data/0/n2-n1/0/n0"
UNHEALTHY = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Warning:|Traceback|Unclosed|kube_config_path")


@dataclass
class Package:
    """The output of `pyflyte package` for a checkout."""

    directory: Path
    tasks: dict[str, TaskSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, checkout: Path, directory: Path, *options: str, **settings: str) -> Package:
        archive = directory / "package.tgz"
        command = [str(Path(sys.executable).with_name("pyflyte")), "--pkgs", "workflows", "package"]
        environment = {**os.environ, "SANDBOX": "1", "WANDB_MODE": "offline", **settings}
        subprocess.run(
            [*command, "--image", IMAGE, "--output", str(archive), *options],
            cwd=checkout,
            env=environment,
            check=True,
            capture_output=True,
        )
        shutil.unpack_archive(archive, directory)
        package = cls(directory)
        for file in directory.glob("*_1.pb"):  # 1: a task
            spec = TaskSpec.FromString(file.read_bytes())
            package.tasks[spec.template.id.name] = spec
        return package

    @property
    def code(self) -> Path:
        """The archive that a fast registration uploads."""
        (archive,) = self.directory.glob("fast*.tar.gz")
        return archive


@dataclass
class Flyte:
    """An execution's place in the object store, and the pods of its nodes."""

    namespace: Namespace
    store: Store
    execution: str

    def prefix(self, node: str) -> str:
        return f"flyte/metadata/propeller/{PROJECT}-{DOMAIN}-{self.execution}/{node}"

    def name(self, node: str, attempt: int) -> str:
        """The pod's name, which is also the last segment of its raw output prefix."""
        unique = "-".join(part for part in node.split("/") if part != "data")
        return f"{self.execution}-{unique}-{attempt}"

    def raw(self, node: str, attempt: int) -> str:
        shard = f"{'abcdef'[attempt]}{len(node) % 10}"  # The shard differs from attempt to attempt.
        return f"s3://flyte/data/{shard}/{self.name(node, attempt)}"

    def labels(self, task: str, node: str) -> dict[str, str]:
        """The labels of the task's pod."""
        return {
            "execution-id": self.execution,
            # The innermost workflow's node alone counts.
            "node-id": node.removesuffix("/data").rpartition("/")[2],
            "task-name": task.replace(".", "-").replace("_", "-"),
            "project": PROJECT,
            "domain": DOMAIN,
            "interruptible": "false",
        }

    def start(
        self,
        package: Package,
        task: str,
        node: str,
        inputs: LiteralMap,
        attempt: int = 0,
        limits: dict[str, str] | None = None,
    ) -> str:
        """Start an attempt's pod; returns its name."""
        template = package.tasks[task].template
        container = container_of(template)
        pod, prefix, raw = self.name(node, attempt), self.prefix(node), self.raw(node, attempt)
        self.store.files.pipe_file(f"{prefix}/inputs.pb", inputs.SerializeToString())
        previous = f"{self.raw(node, attempt - 1)}/_flytecheckpoints" if attempt else '""'
        values = {
            "{{.input}}": f"s3://{prefix}/inputs.pb",
            "{{.outputPrefix}}": f"s3://{prefix}/{attempt}",
            "{{.rawOutputDataPrefix}}": raw,
            "{{.checkpointOutputPrefix}}": f"{raw}/_flytecheckpoints",
            "{{.prevCheckpointPrefix}}": previous,
        }
        if "pyflyte-fast-execute" in container["args"]:
            code = f"flyte/{PROJECT}/{DOMAIN}/ABCDEF/{package.code.name}"
            self.store.files.put_file(str(package.code), code)
            values["{{ .remote_package_path }}"] = f"s3://{code}"
            values["{{ .dest_dir }}"] = "."
        arguments = [values.get(argument, argument) for argument in container["args"]]
        assert not [each for each in arguments if "{{" in each]
        environment = {each["name"]: each["value"] for each in container["env"]} | {
            "FLYTE_INTERNAL_EXECUTION_ID": self.execution,
            "FLYTE_INTERNAL_EXECUTION_PROJECT": PROJECT,
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": DOMAIN,
            "FLYTE_INTERNAL_EXECUTION_WORKFLOW": f"{PROJECT}:{DOMAIN}:workflow",
            "FLYTE_INTERNAL_TASK_PROJECT": PROJECT,
            "FLYTE_INTERNAL_TASK_DOMAIN": DOMAIN,
            "FLYTE_INTERNAL_TASK_NAME": task,
            "FLYTE_INTERNAL_TASK_VERSION": "version",
            "FLYTE_ATTEMPT_NUMBER": str(attempt),
            "FLYTE_AWS_ENDPOINT": self.store.url,
            "FLYTE_AWS_ACCESS_KEY_ID": self.store.keys["AWS_ACCESS_KEY_ID"],
            "FLYTE_AWS_SECRET_ACCESS_KEY": self.store.keys["AWS_SECRET_ACCESS_KEY"],
            "FLYTE_PLATFORM_URL": "flyteadmin.flyte:81",
            "FLYTE_PLATFORM_INSECURE": "true",
        }
        defaults = json.loads(
            self.namespace.kubectl("get", "podtemplate", "flyte-ddp", "--output", "json")
        )["template"]
        (default,) = defaults["spec"].pop("containers")
        own = {
            "name": pod,
            **container,
            "args": arguments,
            "env": [
                *default["env"],
                *({"name": name, "value": value} for name, value in environment.items()),
            ],
            # These requests are smaller than the task's: these nodes have two cores, which other
            # pods share.
            "resources": {
                "requests": limits or {"cpu": "100m", "memory": "512Mi"},
                "limits": limits or {},
            },
        }
        spec = {"restartPolicy": "Never", "serviceAccountName": "flyte-ddp"}
        annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
        apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": pod,
                    "namespace": self.namespace.name,
                    "labels": self.labels(task, node),
                    "annotations": annotations,
                },
                "spec": {**defaults["spec"], **spec, "containers": [{**default, **own}]},
            }
        )
        return pod

    def run(self, package: Package, task: str, node: str, inputs: LiteralMap) -> LiteralMap:
        """The outputs of a task that ends well at its first attempt, without a word of warning."""
        return self.finish(self.start(package, task, node, inputs), node)

    def finish(self, pod: str, node: str) -> LiteralMap:
        """As `run`, of a task that was started."""
        code = self.namespace.wait_for_end(pod, timeout=900)
        log = self.namespace.log(pod)
        outputs = self.outputs(node)
        assert outputs is not None, f"exit code {code}\n{self.error(node)}\n{log}"
        assert [line for line in log.splitlines() if UNHEALTHY.search(line)] == []
        return outputs

    def read(self, node: str, attempt: int, name: str) -> bytes | None:
        try:
            return bytes(self.store.files.cat_file(f"{self.prefix(node)}/{attempt}/{name}"))
        except FileNotFoundError:
            return None

    def outputs(self, node: str, attempt: int = 0) -> LiteralMap | None:
        raw = self.read(node, attempt, "outputs.pb")
        return None if raw is None else LiteralMap.FromString(raw)

    def error(self, node: str, attempt: int = 0) -> ContainerError | None:
        raw = self.read(node, attempt, "error.pb")
        return None if raw is None else ErrorDocument.FromString(raw).error

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint of node `NESTED`."""
        self.store.files.invalidate_cache()
        run = f"{PROJECT}/{DOMAIN}/{self.execution}/n2-0-n2-n1-0-n0"
        found = self.store.files.glob(f"flyte/data/checkpoints/{run}/step-*.json")
        return max((int(re.findall(r"step-(\d+)", path)[0]) for path in found), default=0)


def container_of(template: TaskTemplate) -> dict[str, Any]:
    """The container that Flyte makes of a task: of the task's own pod, where it has one."""
    if template.HasField("k8s_pod"):
        (container,) = MessageToDict(template.k8s_pod.pod_spec)["containers"]
        assert container["name"] == template.config["primary_container_name"]
        found: dict[str, Any] = container
        return found
    given = template.container
    variables = [{"name": each.key, "value": each.value} for each in given.env]
    return {"image": given.image, "args": list(given.args), "env": variables}


def literals(task: Any, **inputs: Any) -> LiteralMap:
    """`inputs` of a task as Flyte passes them on; a literal stays one."""
    given = {name: value for name, value in inputs.items() if not hasattr(value, "WhichOneof")}
    interface = task.python_interface.inputs
    kinds = task.interface.inputs
    context = FlyteContextManager.current_context()
    made = TypeEngine.dict_to_literal_map(
        context, given, {name: interface[name] for name in given}
    ).to_flyte_idl()
    for name in inputs.keys() - given.keys():
        made.literals[name].CopyFrom(inputs[name])
    for name, (_, default) in task.python_interface.inputs_with_defaults.items():
        if name not in inputs:
            literal = TypeEngine.to_literal(context, default, interface[name], kinds[name].type)
            made.literals[name].CopyFrom(literal.to_flyte_idl())
    return made


def listed(outputs: LiteralMap, name: str) -> list[Any]:
    return list(outputs.literals[name].collection.literals)
