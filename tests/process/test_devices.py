"""GPUs are counted and assigned to ranks. A fake stands for the driver's library, because there is
none here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import socket
import time
import types

import pytest

import flyte_ddp
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import NodeMeasured
from flyte_ddp.launch.agent import supervisor
from flyte_ddp.launch.nodes.dask.assignment import assign_nodes
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.process import devices
from tests.support.dask_runs import worker
from tests.support.errors import raises_one_line


class FakeNvml:
    """The calls of libnvidia-ml on a machine with so many GPUs."""

    def __init__(self, num_gpus):
        self.num_gpus = num_gpus

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = self.num_gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = number + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        return 2  # status of a device that is not there

    def nvmlDeviceGetUUID(self, gpu, uuid, size):
        uuid.value = f"GPU-{gpu.value}".encode()
        return 0 if gpu else 2

    def nvmlDeviceGetUtilizationRates(self, gpu, rates):
        rates._obj.gpu = 50 * (gpu.value or 0)
        return 0 if gpu else 2

    def nvmlDeviceGetMemoryInfo(self, gpu, memory):
        memory._obj.total, memory._obj.used = 100, 20 * (gpu.value or 0)
        return 0 if gpu else 2


@pytest.fixture
def machine(monkeypatch):
    """machine(files, library=...): this machine has these device files and these libraries of
    NVIDIA's driver.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def pretend(files, **libraries):
        def load(name):
            key = name.removeprefix("lib").removesuffix(".so.1").replace("-", "_")
            if key not in libraries:
                raise OSError(f"{name}: cannot open shared object file")
            return libraries[key]

        path = types.SimpleNamespace(exists=files.__contains__)
        numbered = [file for file in files if file[-1].isdigit()]
        monkeypatch.setattr(devices, "os", types.SimpleNamespace(path=path, environ=os.environ))
        monkeypatch.setattr(
            devices, "ctypes", types.SimpleNamespace(**{**vars(ctypes), "CDLL": load})
        )
        monkeypatch.setattr(devices, "glob", types.SimpleNamespace(glob=lambda pattern: numbered))

    return pretend


POD = ["/dev/nvidiactl", "/dev/nvidia3"]  # the device plugin keeps the host's number


@pytest.mark.parametrize(
    ("files", "libraries", "expected"),
    [
        (POD, {"cuda": 1, "nvidia_ml": FakeNvml(1)}, ("0",)),
        (POD, {"cuda": 1}, ("0",)),  # NVML is not mounted
        (["/dev/dxg"], {"cuda": 1}, ("0",)),  # WSL
        (["/dev/dxg"], {"cuda": 1, "nvidia_ml": FakeNvml(2)}, ("0", "1")),
        (POD, {"nvidia_ml": FakeNvml(1)}, ()),  # the driver's library is missing
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(machine, files, libraries, expected):
    machine(files, **libraries)
    assert devices.visible_gpus() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1,0", ("1", "0")),
        ("GPU-8f2e,GPU-77aa", ("GPU-8f2e", "GPU-77aa")),
        ("MIG-1a", ("MIG-1a",)),
        ("0,7,1", ("0",)),  # CUDA also stops at the first missing number
        ("-1", ()),
        ("", ()),
    ],
)
def test_cuda_visible_devices_of_the_user_is_respected(machine, monkeypatch, given, expected):
    machine(["/dev/nvidiactl"], cuda=1, nvidia_ml=FakeNvml(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert devices.visible_gpus() == expected


def test_the_use_of_gpus_is_asked_of_the_driver(machine, monkeypatch):
    machine(["/dev/nvidiactl"], cuda=1, nvidia_ml=FakeNvml(2))
    assert devices.measure_gpus(2) == (0.75, 0.4)  # mean utilization, fullest memory
    assert devices.measure_gpus(1) == (0.5, 0.2)
    # The driver does not report the use of this device.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a")
    assert devices.measure_gpus(1) == (None, None)
    machine(["/dev/nvidiactl"], cuda=1)
    assert devices.measure_gpus(1) == (None, None)


def test_each_rank_has_the_uuid_of_its_gpu(machine, monkeypatch):
    machine(["/dev/nvidiactl"], cuda=1, nvidia_ml=FakeNvml(2))
    assert devices.gpu_uuids(2) == ["GPU-1", "GPU-2"]
    # The user's order, and a device that the driver does not know.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,MIG-1a")
    assert devices.gpu_uuids(2) == ["GPU-2", ""]
    machine(["/dev/nvidiactl"], cuda=1)
    assert devices.gpu_uuids(2) == ["", ""]


def test_the_node_and_the_pod_of_a_process_come_from_kubernetes_where_it_runs(monkeypatch):
    name = socket.gethostname()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert devices.locate() == (name, "")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert devices.locate() == ("", name)
    monkeypatch.setenv(devices.NODE_VARIABLE, "node-7")
    assert devices.locate() == ("node-7", name)


def compute():
    while time.process_time() < 1:
        pass


def test_the_use_of_a_node_is_measured_while_ranks_run(monkeypatch, forked_functions):
    monkeypatch.setattr(supervisor, "MIN_INTERVAL", 0.01)
    monkeypatch.setattr(supervisor, "SAMPLE_SECONDS", 0.1)
    seen = []
    listener = types.SimpleNamespace(handle=seen.append, close=lambda error: None)
    flyte_ddp.run(compute, nproc_per_node=1, listeners=[listener])
    measured = [each for each in seen if isinstance(each, NodeMeasured)]
    assert 0 < max(each.cpu for each in measured) <= 1
    assert 0 < measured[-1].memory < 1
    assert (measured[-1].first_rank, measured[-1].gpu_uuids) == (0, [""])
    assert measured[-1].host or measured[-1].pod


def test_a_task_without_its_requested_gpus_fails_with_what_to_check(machine, monkeypatch, tmp_path):
    job = Job(recipe_program("digits", TrainingConfig()), str(tmp_path), 0.0)
    monkeypatch.setenv(devices.REQUESTED_VARIABLE, "2")
    machine(POD)  # The device is there, and the driver's library is not.
    with raises_one_line(
        ConfigError, match="^GPUs: expected 2, .* got 0 .*device plugin.*LD_LIBRARY_PATH"
    ) as caught:
        LocalPlace(1).check(job)
    assert "/usr/local/nvidia/lib64" in str(caught.value)


def environments(config, *workers):
    return [node.environment for node in assign_nodes(workers, config.num_nodes, config)]


def test_a_worker_alone_on_its_host_keeps_what_its_device_plugin_gave_it():
    config = ClusterConfig(num_nodes=2, gpus_per_node=1)
    assert environments(
        config, worker("w-0", "10.0.0.1", ("0",)), worker("w-1", "10.0.0.2", ("0", "1"))
    ) == [{}, {}]


def test_workers_of_one_host_share_its_gpus():
    config = ClusterConfig(num_nodes=2, gpus_per_node=2)
    four = ("0", "1", "2", "3")
    assert environments(
        config, worker("w-0", "10.0.0.1", four), worker("w-1", "10.0.0.1", four)
    ) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    # A sweep's config: other runs have the neighbours.
    config = ClusterConfig(num_nodes=1, gpus_per_node=1)
    claimed = dataclasses.replace(worker("w-1", "10.0.0.1", ("GPU-77aa",)), shares_host=True)
    assert environments(config, claimed) == [{"CUDA_VISIBLE_DEVICES": "GPU-77aa"}]


def test_a_worker_with_too_few_gpus_is_named_with_what_to_check():
    config = ClusterConfig(num_nodes=1, gpus_per_node=2)
    with pytest.raises(
        ConfigError, match="gpus_per_node: expected at most 1, because worker w-0 .* got 2$"
    ):
        environments(config, worker("w-0", "10.0.0.1", ("0",)))
    with pytest.raises(
        ConfigError,
        match="gpus_per_node: expected at most 0, .* got 2. .*device plugin.*LD_LIBRARY_P",
    ):
        environments(config, worker("w-0", "10.0.0.1"))
