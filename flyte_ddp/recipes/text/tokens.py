"""Tokenizers: plain bytes, byte-pair encoding (BPE) trained on the data, or a model's tokenizer.
This module imports no torch.

A tokenizer consists of the files from which transformers loads it. It travels with the data, in a
model's state and in the model's export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
FILES = (TOKENIZER, SETTINGS, "special_tokens_map.json", "chat_template.jinja")
END = "<|endoftext|>"  # token that begins and ends a document in tokenizers made here


class Tokenizer:
    """Texts to tokens and back.

    Args:
        files: contents by name, as `save_pretrained` of transformers writes them. `TOKENIZER` must
            be among them.

    Raises:
        ConfigError: the tokenizer has no token that ends a text.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        from tokenizers import Tokenizer as Library

        self.files = dict(files)
        self._library: Any = Library.from_str(files[TOKENIZER])
        # A model's file may ask for truncation and padding.
        self._library.no_truncation()
        self._library.no_padding()
        # A text that spells out a special token is encoded as ordinary text.
        self._library.encode_special_tokens = True
        end = json.loads(files.get(SETTINGS, "{}")).get("eos_token")
        if isinstance(end, dict):
            found = self._library.token_to_id(end["content"])
        else:
            found = self._library.token_to_id(str(end))
        if found is None:
            raise ConfigError(
                f"tokenizer: expected one with a token that ends a text, got the eos_token {end!r}"
            )
        self.end: int = found
        self.size = max(self._library.get_vocab().values()) + 1  # number of tokens
        self.dtype: np.dtype[Any] = np.dtype(np.int32)
        if self.size <= 256:
            self.dtype = np.dtype(np.uint8)
        elif self.size <= 1 << 15:
            self.dtype = np.dtype(np.int16)
        self._is_bytes = files[TOKENIZER] == _byte_library().to_str()

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, without `end`, as `dtype`."""
        if self._is_bytes:  # a hundred times faster
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens. Bytes that are not UTF-8 become
        U+FFFD.
        """
        return str(self._library.decode(tokens))

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        for name, text in self.files.items():
            (directory / name).write_text(text, encoding="utf-8")


def read_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer with its files in `directory`. Raises ConfigError if there is none."""
    files = {
        name: (directory / name).read_text(encoding="utf-8")
        for name in FILES
        if (directory / name).is_file()
    }
    if TOKENIZER not in files:
        raise ConfigError(
            f'recipe_options.tokens: expected "bytes" or "bpe" for a model without {TOKENIZER}'
        )
    return Tokenizer(files)


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer with one token per byte. 0xFF, which UTF-8 does not use, ends a
    document.
    """
    return _with_settings(_byte_library())


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE, the kind that GPT-2 uses, with up to `vocabulary` tokens."""
    from tokenizers import models, pre_tokenizers, trainers

    library = _byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1, show_progress=False, initial_alphabet=alphabet
    )
    library.train_from_iterator(texts, trainer)
    library.add_special_tokens([END])
    return _with_settings(library)


def _byte_library() -> Any:
    from tokenizers import models, pre_tokenizers

    # Byte-level tokenizers write a printable byte as the character with its number, and the other
    # bytes as the characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(character for character in alphabet if ord(character) > 0xFF)
    characters = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(0xFF)]
    vocabulary = {character: byte for byte, character in enumerate([*characters, END])}
    library = _byte_level(models.BPE(vocabulary, []))
    library.add_special_tokens([END])
    return library


def _byte_level(model: Any) -> Any:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, pre_tokenizers

    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _with_settings(library: Any) -> Tokenizer:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer({TOKENIZER: library.to_str(), SETTINGS: json.dumps(settings)})
