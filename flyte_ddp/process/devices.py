"""The CPU cores and GPUs that this process may use, found without importing torch.

`visible_gpus` also runs in Dask workers that may not have this package: it travels there by value,
so it uses nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import itertools
import os
import socket
from collections.abc import Iterator

MISSING_GPUS_HINT = (
    "Check that the NVIDIA device plugin runs on the node, and that the NVIDIA driver is mounted "
    "into the container and found there: on some clouds its libraries are in "
    "/usr/local/nvidia/lib64, which LD_LIBRARY_PATH must name"
)


# environment variable of a worker's pod: its Kubernetes node
NODE_VARIABLE = "FLYTE_DDP_NODE"
# environment variable of a task that was registered with GPUs: their number
REQUESTED_VARIABLE = "FLYTE_DDP_REQUESTED_GPUS"


def check_requested_gpus() -> None:
    """Raise ConfigError if this process can use fewer GPUs than its task requested: it would
    compute on CPUs.
    """
    from flyte_ddp.errors import ConfigError

    requested = int(os.environ.get(REQUESTED_VARIABLE) or 0)
    found = num_gpus()
    if found < requested:
        raise ConfigError(
            f"GPUs: expected {requested}, as this task requested, got {found} that it can use. "
            f"{MISSING_GPUS_HINT}"
        )


def num_gpus() -> int:
    """Count the GPUs that this process may use. CUDA uses one MIG slice of each."""
    return len(visible_gpus())


def num_cores() -> int:
    """Count the CPU cores that this process may use, within its affinity and its container's
    quota.
    """
    from dask.system import cpu_count

    return max(1, int(cpu_count()))


def cpu_model() -> str:
    """Return the model of this machine's CPU; "" if the kernel does not report it."""
    with contextlib.suppress(OSError):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return ""


def default_num_processes() -> int:
    """Return one rank per GPU; without GPUs, two ranks if there are two cores."""
    return num_gpus() or min(2, num_cores())


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, named as CUDA_VISIBLE_DEVICES names them."""
    # /dev/dxg is the device of WSL2.
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):
        return ()
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # the driver's library is missing, and CUDA without it has no GPU
        return ()
    count = _count_gpus()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return tuple(map(str, range(count)))
    chosen = [name.strip() for name in given.split(",")]
    # CUDA reads names of GPUs and MIG slices, and numbers, and stops at the first other text.
    return tuple(
        itertools.takewhile(
            lambda name: (
                name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < count)
            ),
            chosen,
        )
    )


UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent of the last second


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def measure_gpus(count: int) -> tuple[float | None, float | None]:
    """Return two measurements of the first `count` GPUs of this process: the mean share of time in
    which they are busy, and the share of memory in use on the fullest GPU. Both are None where the
    driver has no figures, as for a MIG slice.
    """
    found: list[tuple[float, float]] = []
    with contextlib.suppress(OSError, AttributeError), _open_nvml() as nvml:
        for name in visible_gpus()[:count]:
            gpu, rates, memory = _find_gpu(nvml, name), _Rates(), _Memory()
            if not (
                nvml.nvmlDeviceGetUtilizationRates(gpu, ctypes.byref(rates))
                or nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory))
            ):
                found.append((rates.gpu / 100, memory.used / memory.total))
    if not found:
        return None, None
    return sum(rate for rate, _ in found) / len(found), max(share for _, share in found)


def gpu_uuids(num_ranks: int) -> list[str]:
    """Return the UUID of the GPU of each rank on this node; "" without a GPU, or if the driver
    does not report the UUID.
    """
    found = [""] * num_ranks
    with contextlib.suppress(OSError, AttributeError), _open_nvml() as nvml:
        for number, name in enumerate(visible_gpus()[:num_ranks]):
            uuid = ctypes.create_string_buffer(UUID_BYTES)
            if not nvml.nvmlDeviceGetUUID(_find_gpu(nvml, name), uuid, UUID_BYTES):
                found[number] = uuid.value.decode()
    return found


def locate() -> tuple[str, str]:
    """Return the node and the pod of this process. In Kubernetes the node is known from
    `NODE_VARIABLE` alone; elsewhere the pod is "".
    """
    name, node = socket.gethostname(), os.environ.get(NODE_VARIABLE, "")
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return node, name
    return node or name, ""


def _find_gpu(nvml: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """Return NVML's handle of a GPU that CUDA_VISIBLE_DEVICES may name so; empty if there is no
    such GPU.
    """
    gpu = ctypes.c_void_p()
    if name.isdigit():
        nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(gpu))
    else:
        nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(gpu))
    return gpu


@contextlib.contextmanager
def _open_nvml() -> Iterator[ctypes.CDLL]:
    """Yield the driver's library for measurements. Raises OSError where it is not there."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
        raise OSError("NVML cannot be used")
    yield nvml
    nvml.nvmlShutdown()


def _count_gpus() -> int:
    """Return the number of GPUs of this container, as CUDA counts them.

    The numbers in /dev are the host's: a container may have nothing but its host's /dev/nvidia3,
    which CUDA calls 0.
    """
    count = ctypes.c_uint()
    with contextlib.suppress(OSError), _open_nvml() as nvml:
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return count.value
    # Some device plugins do not mount the library.
    return len(glob.glob("/dev/nvidia[0-9]*")) or int(os.path.exists("/dev/dxg"))
