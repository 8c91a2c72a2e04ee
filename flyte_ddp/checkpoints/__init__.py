"""Checkpoints: their parts, writing and reading them, and which run owns the place where they are.

Drivers use this file and ownership.py, which import no torch.
"""

import re

from flyte_ddp.storage import Storage

MODEL_STATE = "model_state.pt"  # the trained model's file, beside the checkpoints
EXPORT = "export"  # likewise the directory with the files that other programs load
# in that directory, with the tensors of MODEL_STATE under the same names
EXPORTED_STATE = "model_state.safetensors"
# the first file of the state before a step that was found bad, which retention leaves alone
BAD_STEP = r"bad-step-(\d{10})-00000\.pt"
MAX_STEP = 10**10 - 1  # as many digits as the names of its files have
# seconds in which a checkpoint that is being written may be completed after a rank has failed
WRITE_GRACE = 20.0


def stored_steps(url: str, pattern: str = r"step-(\d{10})\.json") -> list[int]:
    """Return the steps of the checkpoints at `url`. Asks the store once.

    Args:
        pattern: of their names; with that of `BAD_STEP` the steps that were found bad.

    Raises:
        StorageUnavailable, StorageDenied: what is there could not be found out.
    """
    names = Storage(url, timeout=0).names()
    return [int(match[1]) for name in names if (match := re.fullmatch(pattern, name))]
