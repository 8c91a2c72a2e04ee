"""Chats as text: messages in a line of JSON, and the chat template of a tokenizer.

Imports no torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyte_ddp.errors import ConfigError, DataError, in_one_line
from flyte_ddp.recipes.text.pretrained import load_tokenizer
from flyte_ddp.recipes.text.tokens import Tokenizer

Messages = Sequence[Mapping[str, Any]]
ANSWER = "assistant"  # role of the messages that are learned


def read_messages(line: str) -> Messages:
    """Return the messages of a chat. Raises DataError if the line contains none."""
    try:
        messages = json.loads(line)["messages"]
        if any(each["role"] == ANSWER for each in messages):
            return messages  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, IndexError):
        pass
    raise DataError(
        'expected {"messages": [{"role": "user", "content": "..."}, ...]} with an answer of the '
        f"assistant, got {line[:80]!r}"
    )


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        with tempfile.TemporaryDirectory(prefix="tokenizer-") as place:
            tokenizer.save(Path(place))
            self._library = load_tokenizer(Path(place))
        if not self._library.chat_template:
            raise ConfigError(
                "recipe_options.pretrained: expected a model whose tokenizer has a chat template, "
                "because the samples are chats, got a tokenizer without one"
            )

    def split(self, messages: Messages) -> list[tuple[str, bool]]:
        """Return the parts of a chat's text. True beside a part means that it is an answer.

        An answer begins after the text with which the template asks for it.

        Raises:
            DataError: the template refuses the messages, or changes what comes before an answer.
        """
        whole = self._render(messages)
        parts, place = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            before = self._render(messages[:number], add_generation_prompt=True)
            until = self._render(messages[: number + 1])
            if not (until.startswith(before) and whole.startswith(until)):
                raise DataError(
                    "expected a chat template that only adds to the text before an answer, got one "
                    "that changes it"
                )
            parts += [(whole[place : len(before)], False), (until[len(before) :], True)]
            place = len(until)
        return [*parts, (whole[place:], False)]

    def encode(self, parts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Return the tokens of each part."""
        texts = [text for text, _ in parts]
        return self._library(texts, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    def _render(self, messages: Messages, **options: Any) -> str:
        try:
            found = self._library.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template may raise any error
            raise DataError(f"the chat template refuses it: {in_one_line(error)}") from error
        return str(found)
