"""The pet-name tutorial's model. Apart from its recipes, which processes read that never need
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from flyte_ddp.recipes.pet_names import ALPHABET, BLANK

WIDTH, NUM_LAYERS, DROPOUT = 128, 4, 0.1  # the tutorial's

State = tuple[Tensor, ...]  # the recurrent state of N names: tensors of shape (*, N, *)


class NameModel(nn.Module):
    """Predict, for each letter of a name, the letter that follows.

    Args:
        window: letters the model sees, where rows are windows with blanks on the left; 0 where rows
            are whole names with blanks on the right. It is part of the state dict, because names
            must be generated the way the model was trained.
    """

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.lstm = nn.LSTM(len(ALPHABET), WIDTH, NUM_LAYERS, dropout=DROPOUT, batch_first=True)
        self.fc = nn.Linear(WIDTH, len(ALPHABET))

    def get_extra_state(self) -> Any:
        return {"window": self.window}

    def set_extra_state(self, state: Any) -> None:
        self.window = int(state["window"])

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits (N, t, 31) for letters (N, T), indices into `ALPHABET`; t < T where all
        further are blank.
        """
        # to read the lengths would make the host wait for the GPU
        if self.window or letters.is_cuda:
            return self.logits(self.lstm(_one_hot(letters))[0])
        # A batch is two thirds blank or more: packed it takes a CPU half the time.
        lengths = (letters != BLANK).sum(dim=1) + 1
        packed = pack_padded_sequence(
            _one_hot(letters), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = self.lstm(packed)
        return pad_packed_sequence(
            hidden._replace(data=self.logits(hidden.data)), batch_first=True
        )[0]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.fc(hidden)
        return logits

    def next_letter(self, letters: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the logits (N, 31) of the letters that follow `letters` (N,), and the new state.

        Args:
            letters: the next letter of each name; the first one is `BLANK`.
            state: the state returned for the letters before; None at the beginning.
        """
        if not self.window:
            hidden, state = self.lstm(_one_hot(letters[:, None]), state)
            return self.logits(hidden[:, 0]), state
        seen = (
            letters.new_full((1, len(letters), self.window), BLANK) if state is None else state[0]
        )
        seen = torch.cat([seen[:, :, 1:], letters[None, :, None]], dim=2)
        return self(seen[0])[:, -1], (seen,)


def _one_hot(letters: Tensor) -> Tensor:
    return functional.one_hot(letters.long(), len(ALPHABET)).float()
