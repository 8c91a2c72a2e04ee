"""Recipe text trains any causal language model of transformers: by config, directory or name, whole
or split.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.recipes.text import recipe as text_recipe
from tests.support.errors import raises_one_line
from tests.support.gang import run_gang, train_recipe

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
MODELS = {  # recipe_options by the name of the model
    # tied
    "gpt2": {"architecture": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2}},
    "llama": {"architecture": {"model_type": "llama", **SIZES}, "tokens": "bpe", "vocabulary": 300},
    "qwen3": {"architecture": {"model_type": "qwen3", **GROUPED, "tie_word_embeddings": True}},
}
BLOCKS = {"gpt2": "GPT2Block", "llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer"}
IS_TIED = {"gpt2": True, "llama": False, "qwen3": True}
# Models go the same way through the loop: one of each kind of head, whole and split.
CASES = [
    ("gpt2", "fsdp"),
    ("llama", "ddp"),
    ("llama", "fsdp"),
    ("qwen3", "ddp"),
    ("qwen3", "fsdp"),
]
CONFIG = {"epochs": 2, "global_batch_size": 8, "checkpoints_to_keep": 9}
TEXT = "\n".join(
    f"{number} is {number} times one, and {number + number} is {number} times two."
    for number in range(40)
)


def config_for(model, parallel, **config):
    options = {"context": 16, **MODELS.get(model, {}), **config.pop("recipe_options", {})}
    return config_of("text", {**CONFIG, **config, "parallel": parallel, "recipe_options": options})


def prepared_for(directory, options):
    """The directory of the prepared data."""
    file = directory / "text.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEXT)
    data = directory / "data"
    data.mkdir()
    prepare_data(get_recipe("text", options), str(file), data)
    return data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The directories of the prepared data, by model."""
    directory = tmp_path_factory.mktemp("data")
    return {
        model: str(prepared_for(directory / model, config_for(model, "ddp").recipe_options))
        for model in MODELS
    }


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The value of `train_all` on rank 0, by case: two ranks are started once for all cases."""
    return run_gang(2, train_all, data, str(tmp_path_factory.mktemp("models")))[0]


def train_all(world, store, data, directory):
    """Work of a gang: train each case without a break, and from its checkpoint after the first
    epoch.
    """
    text_recipe.SAMPLE_TOKENS = 20  # this process uses few tokens
    found = {}
    for model, parallel in CASES:
        config, place = config_for(model, parallel), Path(directory, model, parallel)
        spaces = [
            dist.PrefixStore(f"{model}-{parallel}-{run}", store) for run in ("whole", "resumed")
        ]
        events = train_recipe(world, spaces[0], "text", config, data[model], str(place / "whole"))
        if world.is_first:
            copy_first_epoch(place / "whole", place / "resumed")
        dist.barrier()
        resumed = train_recipe(
            world, spaces[1], "text", config, data[model], str(place / "resumed")
        )
        found[model, parallel] = events, resumed
    return found


def copy_first_epoch(whole, resumed):
    """Copy what a run of two epochs had left after its first one."""
    last = max(file.name for file in whole.glob("step-*.json")).removesuffix(".json")
    names = [
        name for name in os.listdir(whole) if name.startswith("step-") and not name.startswith(last)
    ]
    resumed.mkdir()
    for name in names:
        shutil.copy(whole / name, resumed / name)


def last_of(events, kind):
    return [event for event in events if event["event"] == kind][-1]


def state_of(events):
    return torch.load(last_of(events, "RunFinished")["model_state_url"], weights_only=True)


def weights(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.long
def test_a_model_learns_and_is_the_same_whole_and_split(trained, model):
    whole, split = (trained[model, parallel][0] for parallel in ("ddp", "fsdp"))
    epochs = [event for event in whole if event["event"] == "EpochFinished"]
    assert epochs[1]["test_loss"] < epochs[0]["test_loss"]
    torch.testing.assert_close(
        weights(state_of(split)), weights(state_of(whole)), rtol=1e-4, atol=1e-5
    )
    assert last_of(split, "EpochFinished")["sample"]


@pytest.mark.parametrize(("model", "parallel"), CASES)
@pytest.mark.long
def test_a_resumed_run_ends_in_the_weights_of_an_undisturbed_one(trained, model, parallel):
    whole, resumed = trained[model, parallel]
    assert last_of(resumed, "CheckpointLoaded")["step"] > 0
    expected, found = state_of(whole), state_of(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in weights(expected).items())


@pytest.mark.parametrize(("model", "parallel"), CASES)
@pytest.mark.long
def test_transformers_loads_the_export_with_equal_logits(trained, model, parallel):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flyte_ddp.recipes.text.model import load_model

    finished = last_of(trained[model, parallel][0], "RunFinished")
    assert finished["not_exported"] == ""
    theirs = AutoModelForCausalLM.from_pretrained(finished["export_url"]).eval()
    assert (
        theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight
    ) is IS_TIED[model]
    ours = load_model(state_of(trained[model, parallel][0])).eval()
    tokenizer = AutoTokenizer.from_pretrained(finished["export_url"])
    text = "cät \n 日本 <"
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == ours.tokenizer.encode([text])[0].tolist()
    assert (tokenizer.eos_token_id, tokenizer.decode(tokens[0])) == (ours.tokenizer.end, text)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens))


@pytest.mark.parametrize("model", MODELS)
def test_the_units_of_a_split_model_are_those_that_transformers_does_not_split(data, model):
    recipe = get_recipe("text", config_for(model, "fsdp").recipe_options)
    recipe.datasets(Path(data[model]))
    with torch.device("meta"):  # Other ranks than the first one make the model on the meta device.
        built = recipe.model()
    assert [type(block).__name__ for block in recipe.blocks(built)] == [BLOCKS[model]] * 2
    assert all(tensor.is_meta for tensor in (*built.parameters(), *built.buffers()))


# By directory and by name


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """A directory with a Llama model, without the files of its run."""
    directory = tmp_path_factory.mktemp("exported") / "llama"
    export = last_of(trained["llama", "ddp"][0], "RunFinished")["export_url"]
    shutil.copytree(export, directory, ignore=shutil.ignore_patterns("model_state*"))
    return directory


@pytest.fixture
def hub(exported, monkeypatch):
    """A Hub that has the model org/tiny, and cannot be reached by the library itself."""
    import huggingface_hub
    from huggingface_hub import constants

    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: str(exported) if name == "org/tiny" else download(name, **options),
    )


@pytest.mark.long
def test_a_model_by_name_or_directory_begins_with_its_weights_and_tokenizer(
    trained, exported, hub, tmp_path, monkeypatch
):
    expected, calls = state_of(trained["llama", "ddp"][0]), []
    for name, source in (("name", "org/tiny"), ("directory", str(exported))):
        options = {"pretrained": source, "context": 16}
        recipe = get_recipe("text", options)
        recipe.datasets(prepared_for(tmp_path / name, options))
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "connect", lambda *arguments: calls.append(arguments))
            state = recipe.model().state_dict()
            with torch.device("meta"):
                assert recipe.model().state_dict().keys() == state.keys()
        assert calls == [], "a rank reaches no network"
        assert all(torch.equal(state[key], value) for key, value in weights(expected).items())
        assert state["_extra_state"]["tokenizer"].keys() >= {"tokenizer.json"}
        assert recipe._tokenizer.end == expected["_extra_state"]["config"]["eos_token_id"]


def edited(exported, directory, **values):
    """A copy of the model with other values in its config."""
    shutil.copytree(exported, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    return {"pretrained": str(directory)}


BAD = {
    "a Hub that does not answer": (
        lambda *_: {"pretrained": "org/other"},
        "a model on the Hub, .* got 'org/other', which cannot be downloaded: .*LocalEntryNotFound",
    ),
    "no causal model": (
        lambda model, place: edited(model, place, model_type="t5"),
        (
            "recipe_options.pretrained: expected a causal language model that transformers has, "
            "got "
            "the model_type 't5'"
        ),
    ),
    "an encoder": (
        lambda *_: {"architecture": {"model_type": "bert", **SIZES}},
        (
            "architecture: expected a causal language model that transformers has, got the "
            "model_type "
            "'bert'"
        ),
    ),
    "an unknown type": (
        lambda *_: {"architecture": {"model_type": "lama"}},
        r"got the model_type 'lama' \(did you mean llama\?\)",
    ),
    "no type": (lambda *_: {"architecture": SIZES}, "got the model_type None"),
    "a vocabulary that is too small": (
        lambda *_: {"architecture": {"model_type": "llama", **SIZES, "vocab_size": 100}},
        (
            "recipe_options.architecture: expected a vocabulary of at least 256, the tokenizer's, "
            "got "
            "100"
        ),
    ),
    "a context that is too long": (
        lambda *_: {"architecture": {"model_type": "llama", **SIZES, "max_position_embeddings": 8}},
        "recipe_options.context: expected at most 8, which the model has, got 16",
    ),
    "a directory of an unknown type": (
        lambda model, place: edited(model, place, model_type="lama"),
        "recipe_options.pretrained: expected a causal .* got the model_type 'lama'",
    ),
    "no tokenizer": (
        lambda model, place: (
            shutil.copytree(model, place, ignore=shutil.ignore_patterns("tokenizer*"))
            and {"pretrained": str(place)}
        ),
        'recipe_options.tokens: expected "bytes" or "bpe" for a model without tokenizer.json',
    ),
    "no weights": (
        lambda model, place: (
            shutil.copytree(model, place, ignore=shutil.ignore_patterns("*.safetensors"))
            and {"pretrained": str(place)}
        ),
        r"recipe_options.pretrained: expected a model .*, which has no file \*.safetensors",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.long
def test_what_cannot_be_trained_is_named_in_one_line_before_a_rank_starts(
    exported, hub, tmp_path, case
):
    make, expected = BAD[case]
    with raises_one_line(ConfigError, match=expected):
        prepared_for(tmp_path, {"context": 16, **make(exported, tmp_path / "model")})


@pytest.mark.long
def test_weights_of_a_part_of_the_model_are_refused(exported, tmp_path):
    """The last layer is missing, for example. transformers would fill it with fresh weights."""
    from safetensors.torch import load_file, save_file

    options = edited(exported, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(
        {name: each for name, each in load_file(file).items() if name != "lm_head.weight"}, file
    )
    recipe = get_recipe("text", {"context": 16, **options})
    recipe.datasets(prepared_for(tmp_path, {"context": 16, **options}))
    with pytest.raises(
        ConfigError,
        match="^recipe_options.pretrained: expected all weights .* for lm_head.weight$",
    ):
        recipe.model()
