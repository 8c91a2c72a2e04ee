"""The CPU cores and GPUs that this process may use, found without importing torch.

`visible_gpus` also runs in Dask workers that may not have this package: it travels there by value,
so it uses nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import glob
import itertools
import os

MISSING_GPUS_HINT = (
    "Check that the NVIDIA device plugin runs on the node, and that the NVIDIA driver is mounted "
    "into the container "
    "and found there: on some clouds its libraries are in /usr/local/nvidia/lib64, which "
    "LD_LIBRARY_PATH must name"
)


# in the environment of a task that was registered with GPUs
REQUESTED_VARIABLE = "FLYTE_DDP_REQUESTED_GPUS"


def check_requested_gpus() -> None:
    """Raise ConfigError if this process can use fewer GPUs than its task requested: it would
    compute on CPUs.
    """
    from flyte_ddp.errors import ConfigError

    requested = int(os.environ.get(REQUESTED_VARIABLE) or 0)
    if (found := num_gpus()) < requested:
        raise ConfigError(
            f"GPUs: expected {requested}, as this task requested, got {found} that it can use. "
            f"{MISSING_GPUS_HINT}"
        )


def num_gpus() -> int:
    """Count the GPUs that this process may use; each MIG slice counts."""
    return len(visible_gpus())


def num_cores() -> int:
    """Count the CPU cores that this process may use, within its affinity and its container's
    quota.
    """
    from dask.system import cpu_count

    return max(1, int(cpu_count()))


def default_num_processes() -> int:
    """Return one rank per GPU; without GPUs, two ranks if there are two cores."""
    return num_gpus() or min(2, num_cores())


def has_mig_slices() -> bool:
    """Return whether the GPUs of this process are MIG slices, of which CUDA gives a process only
    the first.
    """
    return any(name.startswith("MIG-") for name in visible_gpus())


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, named as CUDA_VISIBLE_DEVICES names them."""
    # the latter is WSL2's
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):
        return ()
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # the driver's library is missing, and CUDA without it has no GPU
        return ()
    found = _nvml_gpus()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return found
    chosen = [name.strip() for name in given.split(",")]
    # As CUDA reads it: names of GPUs and MIG slices, or numbers, up to the first that is neither.
    return tuple(
        itertools.takewhile(
            lambda name: (
                name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < len(found))
            ),
            chosen,
        )
    )


def _nvml_gpus() -> tuple[str, ...]:
    """Return the GPUs of this container: numbers, as CUDA counts them, or the names of their MIG
    slices.

    The numbers in /dev are the host's: a container may have nothing but its host's /dev/nvidia3,
    which CUDA calls 0.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        # Device plugins that do not mount the library name what they gave in this variable, or by
        # the files.
        given = os.environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
        if all(name.startswith("MIG-") for name in given):
            return tuple(given)
        count = len(glob.glob("/dev/nvidia[0-9]*")) or int(os.path.exists("/dev/dxg"))
        return tuple(str(index) for index in range(count))
    names: list[str] = []
    try:
        num_devices = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(num_devices))
        for index in range(num_devices.value):
            device, mode, pending, num_slices = (
                ctypes.c_void_p(),
                ctypes.c_uint(),
                ctypes.c_uint(),
                ctypes.c_uint(),
            )
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue
            has_mode = (
                nvml.nvmlDeviceGetMigMode(device, ctypes.byref(mode), ctypes.byref(pending)) == 0
            )
            if not has_mode or not mode.value:
                names.append(str(len(names)))
                continue
            nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(num_slices))
            for number in range(num_slices.value):
                mig, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
                if nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number, ctypes.byref(mig)) == 0:
                    nvml.nvmlDeviceGetUUID(mig, uuid, len(uuid))
                    names.append(uuid.value.decode())
    finally:
        nvml.nvmlShutdown()
    return tuple(names)
