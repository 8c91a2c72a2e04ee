"""Files with a model's state, as programs other than this package write them."""

from __future__ import annotations

import io
import pickle

import torch

from flyte_ddp.storage.state_dict_file import class_names_of, with_class_names


def given_state(contents):
    torch.save(contents, buffer := io.BytesIO())
    return buffer.getvalue()


def prefixed(state, prefix):
    found = {f"{prefix}{key}": value for key, value in state.items()}
    # DDP's state dict keeps these attributes too.
    return with_class_names(found, class_names_of(state))


def of_script(state):
    """A checkpoint of a script with DDP."""
    optimizer = {"state": {}, "param_groups": []}
    return {"model": prefixed(state, "module."), "optimizer": optimizer, "epoch": 3}


# the contents of a file with a state, by the name of their form
FOREIGN = {
    "own": given_state,
    "ddp": lambda state: given_state(prefixed(state, "module.")),
    "compiled": lambda state: given_state(prefixed(state, "_orig_mod.")),
    "both": lambda state: given_state(prefixed(state, "_orig_mod.module.")),
    "script": lambda state: given_state(of_script(state)),
    "pickle-3": lambda state: pickle.dumps(state, 3),
    "pickle": lambda state: pickle.dumps(state, pickle.HIGHEST_PROTOCOL),
    "pickled-script": lambda state: pickle.dumps({"state_dict": state}),
}
