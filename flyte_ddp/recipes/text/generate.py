"""Generate text with a trained model of recipe `text`, token by token. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.config.fields import Limits, check
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes.text.model import Shape, TextModel
from flyte_ddp.recipes.text.tokens import make_tokenizer

MAX_TOKENS = 100_000  # of one text


def generate_text(
    model: TextModel,
    prompt: str = "",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Return `prompt` and the text that `model` continues it with; the same for the same arguments.

    Args:
        model: on the device that computes.
        prompt: the beginning of a document; "" lets the model begin.
        max_tokens: after which the text ends, if the model does not end it before.
        temperature: >= 0; 0 takes the likeliest token each time, 1 draws as the training text has them.
        top_p: in (0, 1]; draws only from the likeliest tokens that together have this probability.
        seed: >= 0.

    Raises:
        ConfigError: an argument is out of range.
    """
    check("max_tokens", max_tokens, int, Limits(minimum=1, maximum=MAX_TOKENS))
    check("temperature", temperature, float, Limits(minimum=0))
    check("top_p", top_p, float, Limits(above=0, maximum=1))
    check("seed", seed, int, Limits(minimum=0))
    tokenizer = make_tokenizer(model.tokenizer)
    (beginning,) = tokenizer.encode([prompt.encode("utf-8", "replace")])
    tokens = [tokenizer.end, *beginning.tolist()]
    first = len(tokens)
    draws = np.random.default_rng(seed).random(max_tokens)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        predictor = predict_next(model, tokens)
        for draw in draws.tolist():
            token = pick_token(next(predictor), temperature, top_p, draw)
            if token == tokenizer.end:
                break
            tokens.append(token)
    model.train(was_training)
    return prompt + tokenizer.decode(tokens[first:])


def load_model(state: Mapping[str, Any]) -> TextModel:
    """Return the model, on the CPU, of a state that recipe `text` wrote. Raises ConfigError for another model's."""
    expected = "model_state: expected the state of recipe text, got"
    try:
        extra = state["_extra_state"]
        model = TextModel(Shape(**extra["shape"]), tokenizer=extra["tokenizer"])
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{expected} another model's") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        gaps = " ".join(str(error).split())  # torch lists them on many lines
        raise ConfigError(f"{expected} one that does not fit its own description: {gaps}") from error
    return model


def predict_next(model: TextModel, tokens: list[int]) -> Iterator[Tensor]:
    """Yield logits (V,) of the token after `tokens`, to which the caller appends one before it asks for the next.

    The keys and values of earlier tokens are kept, so a token costs as much as a forward pass of one. When the context
    is full, its last half is computed again.
    """
    device = model.embedding.weight.device
    context = model.shape.context
    caches = model.new_caches()
    unseen = tokens[-context:]
    while True:
        logits = model(torch.tensor([unseen], device=device), caches)[0, -1]
        num_seen = len(tokens)
        yield logits
        unseen = tokens[num_seen:]
        if caches[0].length + len(unseen) > context:
            caches = model.new_caches()
            unseen = tokens[-max(1, context // 2) :]


def pick_token(logits: Tensor, temperature: float, top_p: float, draw: float) -> int:
    """Return the token that `draw`, uniform in [0, 1), selects among the likeliest ones."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.double().cpu() / temperature
    probabilities, tokens = scaled.softmax(dim=0).sort(descending=True, stable=True)
    cumulated = probabilities.cumsum(dim=0)
    num_kept = min(int((cumulated < top_p).sum()) + 1, len(tokens))
    place = int(torch.searchsorted(cumulated[:num_kept], draw * float(cumulated[num_kept - 1]), right=True))
    return int(tokens[min(place, num_kept - 1)])
