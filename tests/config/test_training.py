"""Every value that cannot be run is refused in one line that names the field, the value and what is
expected.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig, resolve
from flyte_ddp.config.fields import LIMITS, describe_fields, read_object, suggest
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.failures import InputError
from flyte_ddp.flyte.inputs import TrainingOverrides, given, read_text
from flyte_ddp.recipes import pin_initial_state
from flyte_ddp.recipes.image_folder.recipe import ImageFolder
from flyte_ddp.recipes.text.recipe import Text
from tests.support.errors import raises_one_line

OUT_OF_RANGE = [
    *(
        (name, 0)
        for name in (
            "epochs",
            "global_batch_size",
            "evaluation_batch_size",
            "gradient_accumulation",
        )
    ),
    *(
        (name, -3)
        for name in ("epochs", "global_batch_size", "log_interval", "checkpoints_to_keep")
    ),
    *((name, 0) for name in ("log_interval", "checkpoints_to_keep")),
    *((name, -1) for name in ("warmup_steps", "seed", "data_workers", "checkpoint_interval")),
    ("memory_interval", -2),
    *(
        (name, 0.0)
        for name in ("learning_rate", "collective_timeout", "stall_timeout", "store_timeout")
    ),
    *((name, -0.5) for name in ("learning_rate", "weight_decay", "gradient_clip_norm", "momentum")),
    *(
        (name, math.nan)
        for name in ("learning_rate", "weight_decay", "gradient_clip_norm", "momentum")
    ),
    *(
        (name, math.inf)
        for name in ("learning_rate", "weight_decay", "stall_timeout", "store_timeout")
    ),
    ("momentum", 1.0),
    ("seed", 1 << 64),  # torch takes seeds of 64 bits
    ("optimizer", "lbfgs"),
    ("schedule", "step"),
    ("precision", "fp64"),
    ("backend", "mpi"),
    ("optimizer", ""),
    ("optimizer", "AdamW"),
]
WRONG_TYPE = [
    *(("epochs", value) for value in ("3", True, None, 1.5, [3], {}, math.inf, math.nan)),
    *(("learning_rate", value) for value in ("1e-3", True, None, [0.1])),
    *((name, 10**400) for name in ("epochs", "learning_rate")),
    *(("compile", value) for value in (1, 0, "true", None)),
    *(("optimizer", value) for value in (1, None, True, ["sgd"])),
    *(("recipe_options", value) for value in ("{}", 1, None, [])),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE + WRONG_TYPE)
def test_a_bad_value_is_refused_with_field_expectation_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(**{name: value})

    message = str(caught.value)
    assert message.startswith(f"{name}: expected ")
    assert message.endswith(f", got {value!r}")
    assert "\n" not in message


@pytest.mark.parametrize("value", [{1, 2}, math.nan])
def test_an_option_that_json_does_not_know_is_named(value):
    with pytest.raises(
        ConfigError,
        match=(
            r"^recipe_options\['size'\]: expected a JSON value, "
            r"got "
        ),
    ):
        TrainingConfig(recipe_options={"size": value})


def test_a_whole_float_is_a_whole_number_and_a_whole_number_is_a_float():
    config = TrainingConfig(epochs=1e1, learning_rate=1)

    assert (config.epochs, type(config.epochs)) == (10, int)
    assert (config.learning_rate, type(config.learning_rate)) == (1.0, float)


def test_overrides_win_over_recipe_defaults_and_those_over_class_defaults():
    config = resolve(
        {"epochs": 7, "learning_rate": 0.5}, json.loads('{"epochs": 3, "compile": false}')
    )

    assert config == dataclasses.replace(TrainingConfig(), epochs=3, learning_rate=0.5)


def test_an_unknown_field_is_refused_naming_it_and_the_known_ones():
    expected = "^config: expected one of the fields epochs, .*stall_.*, got 'frobnicate'$"
    with pytest.raises(ConfigError, match=expected):
        resolve({}, {"frobnicate": 3})


def test_a_misspelt_field_is_refused_with_the_suggestion_alone():
    expected = r"^config: expected a known field \(did you mean epochs\?\), got 'epoch'$"
    with pytest.raises(ConfigError, match=expected):
        resolve({}, {"epoch": 3})


def test_the_batch_per_rank_is_the_share_of_ranks_and_micro_batches():
    assert TrainingConfig(global_batch_size=64).batch.size_per_rank(4) == 16
    assert TrainingConfig(global_batch_size=64, gradient_accumulation=2).batch.size_per_rank(4) == 8
    expected = (
        r"^global_batch_size: expected a multiple of 3, got 64 \(3 ranks; the nearest is "
        r"63\)$"
    )
    with pytest.raises(ConfigError, match=expected):
        TrainingConfig(global_batch_size=64).batch.size_per_rank(3)
    expected = r"got 4 \(2 ranks x 5 micro-batches \(gradient_accumulation\); the nearest is 10"
    with pytest.raises(ConfigError, match=expected):
        TrainingConfig(global_batch_size=4, gradient_accumulation=5).batch.size_per_rank(2)


@pytest.mark.parametrize("config_class", [TrainingConfig, ClusterConfig])
def test_every_field_is_listed_with_its_default_unit_and_meaning(config_class):
    lines = list(describe_fields(config_class))
    for field in dataclasses.fields(config_class):
        (line,) = (line for line in lines if line.partition(" ")[0] == field.name)
        unit = field.metadata[LIMITS].unit
        assert re.fullmatch(rf"{field.name}( = \S+( {unit})?)? +\S.*", line), line


@pytest.mark.parametrize(
    ("section", "recipe"), [("Language models", Text), ("Images in folders", ImageFolder)]
)
def test_the_docs_have_the_options_and_defaults_of_the_recipe(section, recipe):
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    options = {each.name: each.default for each in dataclasses.fields(recipe)}
    found = {}
    for names, defaults in re.findall(r"^\| (`[a-z_`, ]+`) \|([^|]*)\|", text, re.MULTILINE):
        values = [each.strip("` ").removesuffix(" s") for each in defaults.split(",")]
        found |= dict(
            itertools.zip_longest(
                [each.strip("` ") for each in names.split(",")], values, fillvalue=""
            )
        )
    assert set(found) == set(options)
    for name, default in options.items():
        # others mean something that the text says
        if default and default is not dataclasses.MISSING:
            assert found[name] == ("on" if default is True else f"{default}".removesuffix(".0")), (
                name
            )


def test_an_object_in_the_config_of_the_command_line_travels_as_a_flyte_input():
    monitor = {"metric": "mae", "mode": "min"}
    overrides = TrainingOverrides.from_json(json.dumps({"epochs": 2, "monitor": monitor}))
    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(TrainingOverrides)
    literal = TypeEngine.to_literal(context, overrides, TrainingOverrides, kind)
    assert given(TypeEngine.to_python_value(context, literal, TrainingOverrides)) == {
        "epochs": 2,
        "monitor": monitor,
    }
    overrides = TrainingOverrides.from_json('{"monitor": {"metric": "accuracy"}}')
    assert resolve({}, given(overrides)).monitor.mode == "max"
    expected = "monitor.mode: expected one of auto, min, max, got 'least'"
    with pytest.raises(InputError, match=expected):
        TrainingOverrides.from_json('{"monitor": {"mode": "least"}}')


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("lr", "learning_rate"), ("max_lr", "learning_rate"), ("learningRate", "learning_rate")),
        *(
            ("batch_size", "global_batch_size"),
            ("per_device_train_batch_size", "global_batch_size"),
        ),
        *(
            ("num_epochs", "epochs"),
            ("num_train_epochs", "epochs"),
            ("max_epochs", "epochs"),
            ("wd", "weight_decay"),
        ),
        *(
            ("early_stopping", "patience"),
            ("early_stopping_patience", "patience"),
            ("warmup", "warmup_steps"),
        ),
        *(
            ("lr_scheduler_type", "schedule"),
            ("optim", "optimizer"),
            ("max_grad_norm", "gradient_clip_norm"),
        ),
        *(
            ("gradient_clip_val", "gradient_clip_norm"),
            ("accumulate_grad_batches", "gradient_accumulation"),
        ),
        *(
            ("num_workers", "data_workers"),
            ("fp16", "precision"),
            ("gradient_checkpointing", "activation_checkpointing"),
        ),
        *(
            ("logging_steps", "log_interval"),
            ("save_steps", "checkpoint_interval"),
            ("random_seed", "seed"),
        ),
        ("epoch", "epochs"),
    ],
)
def test_another_frameworks_name_of_a_field_is_answered_with_ours(name, meant):
    expected = rf"^config: .* \(did you mean {meant}\?\), got '{name}'$"
    with pytest.raises(ConfigError, match=expected):
        resolve({}, {name: 1})


def test_a_far_name_is_not_guessed_at():
    assert (
        suggest("lr", ["width"])
        == suggest("ema", ["width"])
        == suggest("frobnicate", ["epochs"])
        == ""
    )


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("c.json", '{\n  "epochs": 3, // three\n  "seed": 1}', "line 3, column"),
        ("c.yaml", "epochs: 3\n\tseed: 1\n", "line 2, column 1"),
        ("c.yaml", "epochs: [1\n", "line 2, column 1"),
        ("", '{"epochs": 3,}', "line 1 column 14"),
    ],
)
def test_a_mistake_in_the_form_of_a_config_is_told_with_its_line_and_column(
    tmp_path, name, text, place
):
    if name:
        (tmp_path / name).write_text(text)
        text = str(tmp_path / name)
    expected = "config: expected a JSON object or the name of a JSON or YAML file, got "
    with raises_one_line(InputError) as caught:
        read_text(TrainingOverrides, text)
    assert str(caught.value).startswith(f"{expected}{text!r}: ")
    assert place in str(caught.value)


def test_a_file_of_the_command_line_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfepochs: 3\n")
    assert read_object("--config", str(tmp_path / "c.yaml")) == {"epochs": 3}


def test_a_resolved_config_is_not_validated_again():
    config = resolve({}, {"epochs": 3})
    assert pin_initial_state(config) is config
