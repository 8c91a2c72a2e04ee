"""Recipe text's model as a directory that transformers loads: its Llama has the same layers by other names.

Rotary positions in halves, RMSNorm, SwiGLU, no biases and a tied output are Llama's too, so the weights are the same
numbers: queries, keys and values apart, gate and up apart. Knows the format of the files; imports no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.recipes.text.tokens import make_tokenizer

END = "<|endoftext|>"  # the token that begins and ends a document; a prompt that spells it out has that token


def save_for_transformers(state: Mapping[str, Any], directory: Path) -> None:
    """Write the files that `AutoModelForCausalLM` and `AutoTokenizer` load from their directory."""
    import safetensors.torch
    import torch

    from flyte_ddp.recipes.text.model import ROPE_BASE, Shape

    extra = state["_extra_state"]
    shape = Shape(**extra["shape"])
    tensors = {"model.embed_tokens.weight": state["embedding.weight"], "model.norm.weight": state["norm.weight"]}
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        tensors[f"{theirs}.input_layernorm.weight"] = state[f"{ours}.attention_norm.weight"]
        tensors[f"{theirs}.post_attention_layernorm.weight"] = state[f"{ours}.feed_forward_norm.weight"]
        tensors[f"{theirs}.self_attn.o_proj.weight"] = state[f"{ours}.attention.output.weight"]
        tensors[f"{theirs}.mlp.down_proj.weight"] = state[f"{ours}.feed_forward.output.weight"]
        for name, part in zip("qkv", state[f"{ours}.attention.qkv.weight"].chunk(3), strict=True):
            tensors[f"{theirs}.self_attn.{name}_proj.weight"] = part.contiguous()
        for name, part in zip(("gate", "up"), state[f"{ours}.feed_forward.gate_and_up.weight"].chunk(2), strict=True):
            tensors[f"{theirs}.mlp.{name}_proj.weight"] = part.contiguous()
    end = make_tokenizer(extra["tokenizer"]).end
    embedding = state["embedding.weight"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": torch.finfo(embedding.dtype).eps,  # what nn.RMSNorm takes without one
        "rope_theta": ROPE_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},  # as transformers 5 reads it
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": str(embedding.dtype).removeprefix("torch."),
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    tokenizer = _tokenizer(extra["tokenizer"], end)
    values = {"config": config, "tokenizer": tokenizer, "tokenizer_config": tokenizer_config}
    for name, value in values.items():
        (directory / f"{name}.json").write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _tokenizer(definition: str, end: int) -> dict[str, Any]:
    """Return a tokenizer in the form of the library `tokenizers`, with a token for the end of a document."""
    parts = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if definition:
        tokenizer: dict[str, Any] = json.loads(definition)
    else:  # each byte is a token
        vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes()) if byte != end}
        model = {"type": "BPE", "vocab": {**vocabulary, END: end}, "merges": []}
        tokenizer = {"version": "1.0", "pre_tokenizer": parts, "decoder": parts, "model": model}
    added = {"id": end, "content": END, "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**tokenizer, "added_tokens": [*tokenizer.get("added_tokens", []), added]}


def _characters_of_bytes() -> list[str]:
    """Return the character that byte-level tokenizers write for each byte, as GPT-2's do."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
