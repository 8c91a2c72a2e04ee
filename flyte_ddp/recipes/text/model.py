"""Recipe text's model: a decoder-only Transformer. Knows no files, and no ranks.

Rotary positions (Su et al., "RoFormer", 2021), RMSNorm before each part of a block, SwiGLU, no biases, and one matrix
for the embedding and the output.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.errors import ConfigError

ROPE_BASE = 10_000.0  # RoFormer's
INITIAL_DEVIATION = 0.02  # GPT-2's

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (T, head width / 2) each


@dataclass(frozen=True)
class Shape:
    vocabulary: int  # tokens that it knows
    context: int  # tokens that it sees at once
    layers: int
    width: int
    heads: int


class KeysAndValues:
    """The keys and values of the tokens that one attention layer has seen, for generating token by token."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        self._stored: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the next T tokens, (B, H, T, D) each, and return all so far."""
        if self._stored is None:
            batch, heads, _, size = keys.shape
            self._stored = keys.new_empty(2, batch, heads, self.context, size)
        end = self.length + keys.shape[2]
        self._stored[0, :, :, self.length : end] = keys
        self._stored[1, :, :, self.length : end] = values
        self.length = end
        return self._stored[0, :, :, :end], self._stored[1, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention, by torch's fastest kernel for the device."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor, rotation: Rotation, cache: KeysAndValues | None = None) -> Tensor:
        """Return (B, T, width) for inputs of this shape. With a `cache` they follow the tokens that it has seen."""
        batch, length, width = inputs.shape
        qkv = self.qkv(inputs).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        mask = None
        if cache is not None:
            seen = cache.length
            keys, values = cache.append(keys, values)
            mask = torch.ones(length, seen + length, dtype=torch.bool, device=inputs.device).tril(seen)
        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        merged: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return merged


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020) with the usual two thirds of 4 x width, rounded up to a multiple of 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(8 * width / 3 / 32)
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.output = nn.Linear(hidden, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        gate, up = self.gate_and_up(inputs).chunk(2, dim=-1)
        outputs: Tensor = self.output(functional.silu(gate) * up)
        return outputs


class Block(nn.Module):
    """One layer: attention and feed-forward network, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, rotation: Rotation, cache: KeysAndValues | None = None) -> Tensor:
        attended = inputs + self.dropout(self.attention(self.attention_norm(inputs), rotation, cache))
        outputs: Tensor = attended + self.dropout(self.feed_forward(self.feed_forward_norm(attended)))
        return outputs


class TextModel(nn.Module):
    """Predict, for each token of a text, the token that follows.

    May be built on the meta device. `reset_parameters` then gives it its weights.

    Args:
        tokenizer: definition of the tokenizer, part of the state dict with the shape: a state means nothing with
            another vocabulary, and can be used without the data it was trained on.
    """

    def __init__(self, shape: Shape, dropout: float = 0.0, tokenizer: str = "") -> None:
        super().__init__()
        self.shape = shape
        self.tokenizer = tokenizer
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, tokens: Tensor, caches: list[KeysAndValues] | None = None) -> Tensor:
        """Return logits (B, T, vocabulary) for tokens (B, T).

        Args:
            caches: of `new_caches`; `tokens` then follow those of the calls before, at most `context` in all.
        """
        first = caches[0].length if caches else 0
        rotation = compute_rotation(first, tokens.shape[1], self.shape.width // self.shape.heads, tokens.device)
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, rotation, caches[number] if caches else None)
        return functional.linear(self.norm(hidden), self.embedding.weight)

    def new_caches(self) -> list[KeysAndValues]:
        return [KeysAndValues(self.shape.context) for _ in self.blocks]

    def reset_parameters(self, seed: int) -> None:
        """Draw fresh weights: a function of `seed` alone. Parameters on the meta device are left as they are."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(initial_value(name, parameter.shape, self.shape.layers, seed))

    def get_extra_state(self) -> Any:
        return {"shape": asdict(self.shape), "tokenizer": self.tokenizer}

    def set_extra_state(self, state: Any) -> None:
        """Raise ConfigError for the state of a model with another vocabulary, also where all sizes are the same."""
        if state["tokenizer"] != self.tokenizer:
            raise ConfigError(
                f"vocabulary: expected a state with the vocabulary of this data, {_describe(self.tokenizer)}, got one "
                f"with {_describe(state['tokenizer'])}"
            )


def initial_value(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """Return the initial value of one parameter of a `TextModel`, the same for every order and place of the calls.

    So any rank can draw any parameter alone. As in GPT-2, what is added to the residual stream starts smaller the more
    layers there are.
    """
    if len(shape) == 1:
        return torch.ones(shape)  # of a norm
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    is_added = name.endswith("output.weight")
    deviation = INITIAL_DEVIATION / math.sqrt(2 * layers) if is_added else INITIAL_DEVIATION
    return torch.empty(shape, device="cpu").normal_(0.0, deviation, generator=generator)


def compute_rotation(first: int, length: int, size: int, device: torch.device) -> Rotation:
    """Return the cosines and sines for `length` positions from `first` on, of heads of width `size`."""
    frequencies = ROPE_BASE ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(first, first + length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(values: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of features (i, i + D/2) of `values` (B, H, T, D) by the angle of its position."""
    cosines, sines = (part.to(values.dtype) for part in rotation)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


def _describe(tokenizer: str) -> str:
    return f"BPE {hashlib.sha256(tokenizer.encode()).hexdigest()[:8]}" if tokenizer else "bytes"
