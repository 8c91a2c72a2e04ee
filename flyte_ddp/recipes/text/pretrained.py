"""Models of transformers by name, directory or config, which `prepare` fetches and checks once.
This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.config.fields import suggest
from flyte_ddp.errors import ConfigError, in_one_line
from flyte_ddp.storage import Storage, fetch_file, permit, redact_url

CONFIG, WEIGHTS = "config.json", ".safetensors"
SUFFIXES = (WEIGHTS, ".json", ".jinja")  # suffixes of the files that are read; none contains code
FIELD = "recipe_options.pretrained"


def fetch_model(source: str, directory: Path) -> dict[str, Any]:
    """Copy a model's files into `directory`, and return its config.

    Args:
        source: path or URL of a directory, or the name of a model on the Hub.

    Raises:
        ConfigError: there is no such model, or it has no weights in safetensors.
    """
    expected = (
        f"{FIELD}: expected a model on the Hub, or a directory or URL with one, got "
        f"{redact_url(source)!r}"
    )
    place = source
    if "://" not in source and not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        patterns = [f"*{suffix}" for suffix in SUFFIXES]
        try:
            place = str(snapshot_download(source, allow_patterns=patterns, ignore_patterns="*/*"))
        except (OSError, ValueError) as error:  # base classes of the Hub's errors
            raise ConfigError(
                f"{expected}, which cannot be downloaded: {in_one_line(error)}"
            ) from error
        permit(place)
    names = [
        name for name in Storage(place, FIELD).find() if "/" not in name and name.endswith(SUFFIXES)
    ]
    for needed in (CONFIG, WEIGHTS):
        if not any(name.endswith(needed) for name in names):
            raise ConfigError(f"{expected}, which has no file *{needed}")
    directory.mkdir()
    for name in names:
        fetch_file(f"{place.rstrip('/')}/{name}", directory / name, FIELD)
    return dict(json.loads((directory / CONFIG).read_text(encoding="utf-8")))


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of transformers with its files in `directory`.

    Raises:
        ConfigError: transformers refuses the files, for example because they name code.
    """
    from transformers import AutoTokenizer

    try:
        # Without `trust_remote_code`, transformers asks on the terminal whether to run code.
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except ValueError as error:
        raise ConfigError(
            f"{FIELD}: transformers refuses the tokenizer: {in_one_line(error)}"
        ) from error


def leave_hub() -> None:
    """Keep this process from the Hub: a rank has all files that it needs."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def make_config(values: Mapping[str, Any], field: str, size: int = 0, context: int = 0) -> Any:
    """Return the config of transformers with these values.

    Args:
        size: tokens of the tokenizer's vocabulary; the model's vocabulary must be as large.
        context: tokens of a window; the model must see as many at once.

    Raises:
        ConfigError: transformers has no such causal language model, or the model is too small for
            `size` or `context`.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind = values.get("model_type")
    try:
        config = None
        if kind in KNOWN:
            config = AutoConfig.for_model(**values)
    except Exception as error:  # any error is possible, such as a size of another type
        raise ConfigError(
            f"{field}: transformers refuses this config: {in_one_line(error)}"
        ) from error
    if config is None or getattr(config, "is_decoder", True) is False:
        raise ConfigError(
            f"{field}: expected a causal language model that transformers has, got the model_type "
            f"{kind!r}{suggest(kind, KNOWN)}"
        )
    text = config.get_text_config()
    if size > text.vocab_size:
        raise ConfigError(
            f"{field}: expected a vocabulary of at least {size:,}, the tokenizer's, got "
            f"{text.vocab_size:,}"
        )
    longest = getattr(text, "max_position_embeddings", None) or context
    if context > longest:
        raise ConfigError(
            f"recipe_options.context: expected at most {longest:,}, which the model "
            f"has, got {context:,}"
        )
    return config
