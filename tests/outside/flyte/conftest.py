"""Real executions on the Flyte that FLYTECTL_CONFIG names. Their tasks run on the cluster that
KUBECONFIG names.

`make test-flyte IMAGE=...` runs them. The nodes have the image already, and the namespace of the
project has what a platform engineer applies: the operator, and deploy/'s rights and network policy.
A training task of SANDBOX=1 asks for two CPUs, so a node of two cores has to be free for it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flytekit.configuration import Config
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase
from flytekit.remote import FlyteRemote
from flytekit.remote.executions import FlyteNodeExecution, FlyteWorkflowExecution

from tests.outside.kubernetes.conftest import eventually
from tests.support.checkout import copy_repository
from tests.support.clusters import SMALL_CLUSTER

BIN = Path(sys.executable).parent
IMAGE = os.environ.get("FLYTE_DDP_TEST_IMAGE", "flyte-ddp:dev")
PROJECT, DOMAIN = "flytesnacks", "development"
NAMESPACE = f"{PROJECT}-{DOMAIN}"
SETTINGS = {"SANDBOX": "1", "WANDB_MODE": "offline"}

PROBLEM = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|Unclosed|not provided")


def kubectl(*arguments: str, check: bool = True) -> str:
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def items(kind: str, selector: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        kubectl("get", kind, "--selector", selector, "--output", "json")
    )["items"]
    return found


@dataclasses.dataclass
class Execution:
    """An execution, and the pods of its tasks."""

    remote: FlyteRemote
    name: str

    def sync(self) -> FlyteWorkflowExecution:
        execution = self.remote.fetch_execution(name=self.name)
        return self.remote.sync_execution(execution, sync_nodes=True)

    @property
    def is_over(self) -> bool:
        ends = (Phase.SUCCEEDED, Phase.FAILED, Phase.ABORTED, Phase.TIMED_OUT)
        return self.remote.fetch_execution(name=self.name).closure.phase in ends

    def wait(self, timeout: float = 900) -> FlyteWorkflowExecution:
        """Return the execution once it is over."""
        eventually(
            lambda: self.is_over, timeout, f"the end of {self.name}; its pods: {self.pods()}"
        )
        return self.sync()

    def outputs(self, timeout: float = 900) -> Any:
        """Return the outputs of an execution that has to succeed."""
        execution = self.wait(timeout)
        assert execution.closure.phase == Phase.SUCCEEDED, (
            f"{self.name}: {execution.error}\n{self.logs()}"
        )
        return execution.outputs

    def pods(self) -> list[str]:
        """Return the names of the pods of its tasks, retries included, oldest first."""
        pods = sorted(
            items("pods", f"execution-id={self.name}"),
            key=lambda pod: pod["metadata"]["creationTimestamp"],
        )
        return [pod["metadata"]["name"] for pod in pods]

    def pod_of(
        self, task: str, attempt: int = 0, timeout: float = 600, running: bool = True
    ) -> str:
        """Return the pod of an attempt of a task, such as train-on-one-node, once it runs, or only
        has a node.
        """

        def find() -> str:
            for pod in items("pods", f"execution-id={self.name}"):
                name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
                if (
                    labels.get("task-name", "").endswith(task)
                    and name.endswith(f"-{attempt}")
                    and (
                        pod["status"].get("phase") == "Running"
                        if running
                        else pod["spec"].get("nodeName")
                    )
                ):
                    return str(name)
            assert not self.is_over, f"{self.name} ended: {self.sync().error}"
            return ""

        return str(eventually(find, timeout, f"attempt {attempt} of {task} in {self.name}"))

    def log(self, pod: str) -> str:
        return kubectl("logs", pod, check=False)

    def logs(self) -> str:
        return "\n".join(f"--- {pod}\n{self.log(pod)[-6000:]}" for pod in self.pods())

    def node(self, task: str) -> FlyteNodeExecution:
        """Return the node, at any depth, that ran `task`."""

        def search(nodes: Iterable[FlyteNodeExecution]) -> FlyteNodeExecution | None:
            for node in nodes:
                if any(each.id.task_id.name.endswith(task) for each in node.task_executions):
                    return node
                inner = [
                    each
                    for nested in node.workflow_executions
                    for each in nested.node_executions.values()
                ]
                if found := search([*node.subworkflow_node_executions.values(), *inner]):
                    return found
            return None

        found = search(self.sync().node_executions.values())
        assert found is not None, f"{self.name} ran no {task}"
        return found

    def errors(self, task: str) -> dict[int, str]:
        """Return the error of each attempt of `task` that has failed, also where a retry has
        deleted its pod.
        """
        attempts = self.node(task).task_executions
        return {
            each.id.retry_attempt: each.closure.error.message
            for each in attempts
            if each.closure.error
        }

    def read_bytes(self, url: str) -> bytes:
        """Return an object in the store of Flyte's outputs."""
        signed = self.remote.client.get_download_signed_url(url).signed_url
        with urllib.request.urlopen(signed, timeout=30) as answer:
            return bytes(answer.read())

    def read(self, url: str) -> str:
        return self.read_bytes(url).decode()

    def deck(self, task: str) -> str:
        return self.read(self.node(task).closure.deck_uri)

    def load(self, url: str) -> dict[str, torch.Tensor]:
        """Return the state dict in a file of outputs."""
        state: dict[str, torch.Tensor] = torch.load(
            io.BytesIO(self.read_bytes(url)), weights_only=True
        )
        return state

    def history(self, outputs: Any) -> list[dict[str, Any]]:
        """Return the events of a training run."""
        return [
            json.loads(line) for line in self.read(outputs["history"].remote_source).splitlines()
        ]


def assert_quiet(execution: Execution) -> None:
    """No pod of the execution printed a warning, an error, or a path that nobody can reach once it
    is gone.
    """
    for pod in execution.pods():
        log = execution.log(pod)
        assert [line for line in log.splitlines() if PROBLEM.search(line)] == [], pod
        assert not re.search(r"^(model state|report|history)\s+/", log, re.M), log[-2000:]


@dataclasses.dataclass
class Checkout:
    """A copy of the repository's files, or a project of a user's own, from which somebody registers
    and runs.
    """

    directory: Path
    remote: FlyteRemote
    image: str = IMAGE
    bin: Path = BIN  # the commands of its environment

    def call(
        self, *command: str, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.directory,
            env={
                **os.environ,
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                **SETTINGS,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def run(self, file: str, workflow: str, *inputs: str, **environment: str) -> Execution:
        """`pyflyte run --remote`, as the README shows it."""
        done = self.call(
            *(
                "pyflyte",
                "run",
                "--remote",
                "--copy",
                "all",
                "--image",
                self.image,
                "--service-account",
                "flyte-ddp",
                file,
                workflow,
            ),
            *inputs,
            **environment,
        )
        return self.started(done)

    def train(self, *inputs: str, **environment: str) -> Execution:
        """Start `single_node_training_wf`."""
        return self.run(
            "workflows/single_node.py", "single_node_training_wf", *inputs, **environment
        )

    def train_on_cluster(self, *inputs: str, **cluster: Any) -> Execution:
        """Start `multi_node_training_wf` on a small cluster of two nodes, with values of its
        configuration.
        """
        given = ("--cluster", json.dumps({"kind": "kubernetes", **SMALL_CLUSTER, **cluster}))
        return self.run("workflows/multi_node.py", "multi_node_training_wf", *given, *inputs)

    def started(self, done: subprocess.CompletedProcess[str]) -> Execution:
        """Return the execution that a command has started."""
        assert done.returncode == 0, done.stdout + done.stderr
        (name,) = set(re.findall(r"executions/([a-z0-9]+)", done.stdout + done.stderr))
        return Execution(self.remote, name)

    def register(self, version: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """`make register`, as the README shows it."""
        given = {
            "IMAGE": self.image,
            "VERSION": version,
            "PROJECT": PROJECT,
            "DOMAIN": DOMAIN,
            **SETTINGS,
            **settings,
        }
        done = self.call(
            "make", "register", *(f"{name}={value}" for name, value in given.items()), timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="session")
def remote() -> FlyteRemote:
    config = os.environ.get("FLYTECTL_CONFIG")
    if not config or not os.environ.get("KUBECONFIG"):
        pytest.skip("FLYTECTL_CONFIG names no Flyte, or KUBECONFIG no cluster")
    return FlyteRemote(Config.auto(config), PROJECT, DOMAIN)


@pytest.fixture(scope="module")
def checkout(remote: FlyteRemote, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that no other module changes."""
    directory = tmp_path_factory.mktemp("checkout")
    copy_repository(directory)
    return Checkout(directory, remote)


@pytest.fixture
def aborted(remote: FlyteRemote) -> Iterator[list[Execution]]:
    """Executions that are ended with the test, whether it passes or not."""
    executions: list[Execution] = []
    yield executions
    for execution in executions:
        if not execution.is_over:
            remote.terminate(remote.fetch_execution(name=execution.name), "the test is over")


@pytest.fixture(scope="session")
def unique() -> str:
    """A part of names that no other run of the tests uses."""
    return uuid.uuid4().hex[:6]
