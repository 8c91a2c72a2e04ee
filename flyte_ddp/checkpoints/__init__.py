"""Checkpoints: their parts, writing and reading them, and which run owns the place where they are.

Drivers use this file and ownership.py, which import no torch.
"""

import re

from flyte_ddp.storage import Storage

MODEL_STATE = "model_state.pt"  # the trained model's file, beside the checkpoints
EXPORT = "export"  # the directory beside the checkpoints with files that other programs load
# the file in EXPORT with the tensors of MODEL_STATE under the same names
EXPORTED_STATE = "model_state.safetensors"
# the first file of the state before a step that was found bad, which retention leaves alone
BAD_STEP = r"bad-step-(\d{10})-00000\.pt"
MAX_STEP = 10**10 - 1  # file names have ten digits for the step
# seconds after a rank's failure in which the write of a checkpoint may be completed
WRITE_GRACE = 20.0


def stored_steps(url: str, pattern: str = r"step-(\d{10})\.json") -> list[int]:
    """Return the steps of the checkpoints at `url`. Asks the store once.

    Args:
        pattern: the regular expression of the file names, whose first group is the step.
            `BAD_STEP` finds the steps that were found bad.

    Raises:
        StorageUnavailable, StorageDenied: the place could not be listed.
    """
    names = Storage(url, timeout=0).names()
    matches = (re.fullmatch(pattern, name) for name in names)
    return [int(match[1]) for match in matches if match]
