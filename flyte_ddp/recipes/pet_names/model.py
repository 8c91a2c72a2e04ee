"""The pet-name tutorial's model. It has its own module because it imports torch, and the recipe's
module must not.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from flyte_ddp.recipes.pet_names import ALPHABET, BLANK

WIDTH, NUM_LAYERS, DROPOUT = 128, 4, 0.1  # values of the tutorial

State = tuple[Tensor, ...]  # state of the LSTM for N names: two tensors of shape (*, N, *)


class NameModel(nn.Module):
    """Predict, for each letter of a name, the letter that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(len(ALPHABET), WIDTH, NUM_LAYERS, dropout=DROPOUT, batch_first=True)
        self.fc = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits (N, t, 31) for letters (N, T), indices into `ALPHABET` with blanks on the
        right. t is less than T if all further letters are blank.
        """
        if letters.is_cuda:  # Reading the lengths would make the host wait for the GPU.
            logits: Tensor = self.fc(self.lstm(_one_hot(letters))[0])
            return logits
        # At least two thirds of a batch are blank: a packed batch takes a CPU half the time.
        lengths = (letters != BLANK).sum(dim=1) + 1
        packed = pack_padded_sequence(
            _one_hot(letters), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = self.lstm(packed)
        return pad_packed_sequence(hidden._replace(data=self.fc(hidden.data)), batch_first=True)[0]

    def next_letter(self, letters: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the logits (N, 31) of the letters that follow `letters` (N,), and the new state.

        Args:
            letters: the next letter of each name; the first one is `BLANK`.
            state: the state returned for the letters before; None at the beginning.
        """
        hidden, state = self.lstm(_one_hot(letters[:, None]), state)
        return self.fc(hidden[:, 0]), state


def _one_hot(letters: Tensor) -> Tensor:
    return functional.one_hot(letters.long(), len(ALPHABET)).float()
