"""Tokenizers: bytes as they are, byte-pair encoding (BPE) trained on the data, or that of a model.
Imports no torch.

A tokenizer is the files from which transformers loads it: it travels with the data, in a model's
state and its export.
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
END = "<|endoftext|>"  # the token that begins and ends a document, of tokenizers made here


class Tokenizer:
    """Texts to tokens and back.

    Args:
        files: contents by name, as `save_pretrained` of transformers writes them, `TOKENIZER` among
            them.

    Raises:
        ConfigError: it has no token that ends a text.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        from tokenizers import Tokenizer as Library

        self.files = dict(files)
        self._library: Any = Library.from_str(files[TOKENIZER])
        self._library.no_truncation()  # which the file of a model may ask for
        self._library.no_padding()
        # a text that spells out the end of a document has it as any text
        self._library.encode_special_tokens = True
        end = json.loads(files.get(SETTINGS, "{}")).get("eos_token")
        found = self._library.token_to_id(end["content"] if isinstance(end, dict) else str(end))
        if found is None:
            raise ConfigError(
                f"tokenizer: expected one with a token that ends a text, got the eos_token {end!r}"
            )
        self.end: int = found
        self.size = max(self._library.get_vocab().values()) + 1  # of the vocabulary
        self.dtype = np.dtype(
            np.uint8 if self.size <= 256 else np.int16 if self.size <= 1 << 15 else np.int32
        )
        self._is_bytes = files[TOKENIZER] == _byte_library().to_str()

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, without `end`, as `dtype`."""
        if self._is_bytes:  # a hundred times faster
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, nothing for special ones; what is not UTF-8 becomes
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
    """Return the tokenizer whose tokens are bytes. 0xFF, which UTF-8 does not have, ends a
    document.
    """
    return _with_settings(_byte_library())


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE, as GPT-2 has it, with up to `vocabulary` tokens."""
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

    # Byte-level tokenizers write a printable byte as the character with its number, the others as
    # those from 256 on.
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
