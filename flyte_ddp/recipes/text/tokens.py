"""Tokenizers: bytes as they are, or byte-pair encoding (BPE) trained on the data. Imports no torch.

A tokenizer has a `definition`, a string from which `make_tokenizer` makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.errors import ConfigError, StorageDenied, StorageUnavailable
from flyte_ddp.storage import read_file

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Tokenizer:
    """Texts to tokens and back: each byte is a token. 0xFF, which UTF-8 does not have, ends a document."""

    definition = ""
    size = 256  # of the vocabulary
    end = 0xFF  # the token that ends a document

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the tokens of each text, without `end`, in the smallest type that holds them.

        Raises:
            UnicodeDecodeError: the tokenizer needs UTF-8 and a text has something else.
        """
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; what is not UTF-8 becomes U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")

    def num_bytes(self, tokens: NDArray[Any]) -> int:
        """Return how many bytes of text `tokens` stand for."""
        return int(np.count_nonzero(tokens != self.end))


class Bpe(Tokenizer):
    """Byte-level BPE as GPT-2 has it, by the library `tokenizers`.

    The end of a document is no token of the library's: it would be found in texts that spell it out.

    Args:
        definition: JSON, as the library writes it.
    """

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer as Library

        self.definition = definition
        self._library = Library.from_str(definition)
        self.end = self._library.get_vocab_size()
        self.size = self.end + 1
        # Every character of a byte-level token stands for one byte.
        vocabulary = self._library.get_vocab()
        self._num_bytes = np.zeros(self.size, dtype=np.int64)
        for token, number in vocabulary.items():
            self._num_bytes[number] = len(token)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        encoded = self._library.encode_batch_fast([text.decode("utf-8") for text in texts], add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int16) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._library.decode([token for token in tokens if token != self.end], skip_special_tokens=False)
        return text

    def num_bytes(self, tokens: NDArray[Any]) -> int:
        return int(self._num_bytes[tokens].sum())


def make_tokenizer(definition: str) -> Tokenizer:
    """Return the tokenizer with this definition; "" is that of bytes."""
    return Bpe(definition) if definition else Tokenizer()


def load_tokenizer(url: str) -> Tokenizer:
    """Return the BPE of the model with the state at `url`. Raises ConfigError if there is none, or a store's error."""
    from flyte_ddp.storage.weights import from_bytes  # imports torch

    field = "recipe_options.vocabulary_of"
    expected = f"{field}: expected the model_state.pt of a run of recipe text with a bpe, got {url!r}, which"
    try:
        state = from_bytes(read_file(url, field))
        definition = state["_extra_state"]["tokenizer"]
    except FileNotFoundError:
        raise ConfigError(f"{expected} does not exist") from None
    except (StorageDenied, StorageUnavailable):
        raise
    except Exception as error:  # of any kind: the bytes of another file may look like anything
        raise ConfigError(f"{expected} is another file") from error
    if not definition:
        raise ConfigError(f"{expected} has bytes as tokens")
    return Bpe(definition)


def train_bpe(texts: Iterator[str], vocabulary: int) -> Bpe:
    """Train a BPE with up to `vocabulary` tokens, at most 32,768, the end of a document included."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    library.train_from_iterator(texts, trainer)
    return Bpe(library.to_str())
