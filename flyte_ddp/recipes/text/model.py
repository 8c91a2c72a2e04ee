"""Recipe text's model: any causal language model of transformers, with its tokenizer. This module
knows no ranks and no network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.config.fields import Limits, check
from flyte_ddp.errors import ConfigError, in_one_line
from flyte_ddp.recipes.text.pretrained import CONFIG, FIELD, WEIGHTS, leave_hub, make_config
from flyte_ddp.recipes.text.tokens import Tokenizer

MAX_TOKENS = 100_000  # limit on the tokens of one generated text
DEFAULT_CONTEXT = 2048  # tokens that a model without a limit sees at once while generating


class TextModel(nn.Module):
    """Predict, for each token of a text, the token that follows.

    The config and the tokenizer are part of the state dict: a state means nothing with another
    vocabulary, and can be used without the data it was trained on.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer

    def forward(self, tokens: Tensor, **generation: Any) -> Any:
        """Return logits (B, T, vocabulary) for tokens (B, T), or for tokens and their positions
        (B, 2, T).

        Attention stays inside a document, whose positions begin at 0.

        Args:
            generation: options of transformers' `generate`. With them the generated tokens are
                returned instead. `forward` calls `generate`, because a model that is split over
                ranks gathers its weights for its `forward`.
        """
        if generation:
            return self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **generation)
        positions = {}
        if tokens.dim() == 3:
            tokens, positions["position_ids"] = tokens.unbind(1)
        return self.model(input_ids=tokens, use_cache=False, **positions).logits

    def get_extra_state(self) -> Any:
        return {
            "config": json.loads(self.model.config.to_json_string()),
            "tokenizer": self.tokenizer.files,
        }

    def set_extra_state(self, state: Any) -> None:
        """Raise ConfigError for the state of a model with another vocabulary, even if all sizes are
        the same.
        """
        if state["tokenizer"] != self.tokenizer.files:
            raise ConfigError(
                "vocabulary: expected a state with the tokenizer of this data, got one with "
                "another; recipe_options.pretrained starts from a run's export with its tokenizer"
            )


def open_model(directory: Path, tokenizer: Tokenizer) -> TextModel:
    """Return the model in `directory`, with its weights. If there is only a config, the weights are
    fresh.

    Raises:
        ConfigError: the files lack some of the model's weights.
    """
    from transformers import AutoModelForCausalLM

    leave_hub()
    has_weights = any(file.suffix == WEIGHTS for file in directory.iterdir())
    if not has_weights or torch.get_default_device().type == "meta":
        values = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        config = make_config(values, "recipe_options.architecture")
        return TextModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer)
    model, found = AutoModelForCausalLM.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ConfigError(
            f"{FIELD}: expected all weights of a causal language model, got none for {missing[0]}"
        )
    return TextModel(model, tokenizer)


def load_model(state: Mapping[str, Any], assign: bool = False) -> TextModel:
    """Return the model, on the CPU, of a state that recipe `text` wrote.

    Args:
        assign: use the state's own memory for the weights.

    Raises:
        ConfigError: another recipe wrote the state.
    """
    from transformers import AutoModelForCausalLM

    try:
        extra = state["_extra_state"]
        config = make_config(extra["config"], "model_state")
        model = TextModel(AutoModelForCausalLM.from_config(config), Tokenizer(extra["tokenizer"]))
        model.load_state_dict(state, assign=assign)
    except (TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(
            "model_state: expected the state of recipe text, got another model's: "
            f"{in_one_line(error)}"
        ) from error
    return model


def export_model(state: Mapping[str, Any], directory: Path) -> None:
    """Write the files that `AutoModelForCausalLM` and `AutoTokenizer` load, without a copy of the
    state.
    """
    with torch.device("meta"):
        model = load_model(state, assign=True)
    model.model.tie_weights()
    model.model.save_pretrained(directory)
    model.tokenizer.save(directory)


def generate_text(
    model: TextModel,
    prompt: str = "",
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Return `prompt` and the model's continuation. The same arguments return the same text.

    When the context is full, the text goes on from its last half.

    Args:
        model: a model on the device that computes.
        prompt: the beginning of a document; "" lets the model begin.
        max_tokens: limit on the tokens of the continuation, if the model does not end it before.
        temperature: >= 0; 0 takes the likeliest token each time, 1 draws tokens as often as they
            follow in the training text.
        top_p: in (0, 1]; draws only from the likeliest tokens that together have this probability.
        seed: >= 0.

    Raises:
        ConfigError: an argument is out of range.
    """
    check("max_tokens", max_tokens, int, Limits(minimum=1, maximum=MAX_TOKENS))
    check("temperature", temperature, float, Limits(minimum=0))
    check("top_p", top_p, float, Limits(above=0, maximum=1))
    check("seed", seed, int, Limits(minimum=0))
    end = model.tokenizer.end
    clean_prompt = prompt.encode("utf-8", "replace").decode()
    tokens = [end, *model.tokenizer.encode([clean_prompt])[0].tolist()]
    first, device = len(tokens), next(model.parameters()).device
    context = (
        getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
        or DEFAULT_CONTEXT
    )
    options: dict[str, Any] = {
        "eos_token_id": end,
        "pad_token_id": end,
        "do_sample": temperature > 0,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        left = max_tokens
        while left > 0:
            seen = tokens[-max(1, context // 2) :]
            longest = min(left, context - len(seen) + 1)  # The model never sees the last token.
            inputs = torch.tensor([seen], device=device)
            outputs = model(inputs, max_new_tokens=longest, **options)
            new = outputs[0, len(seen) :].tolist()
            tokens += new
            left -= len(new)
            if new[-1] == end:
                break
    model.train(was_training)
    return prompt + model.tokenizer.decode(tokens[first:])
