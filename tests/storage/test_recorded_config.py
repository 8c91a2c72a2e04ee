"""What a record hides is compared by its true value, and nothing is built from its form for
showing.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import RunState
from flyte_ddp.observers.reports.run_card import CARD_JSON, card_files, run_card
from flyte_ddp.prediction import predict as prediction
from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.recipes.recorded import restore_options
from flyte_ddp.rehearsal import replay
from flyte_ddp.storage import Storage, recorded_config, redact_url, redact_values
from flyte_ddp.storage.recorded_config import RecordedConfig, hash_hidden
from flyte_ddp.training.initial_state import check_same_run
from tests.promotion.test_champion import manifest
from tests.support.errors import raises_one_line
from tests.support.short_run import run_finished, started, whole_run

RECIPE = "tests.support.recipes.WithToken"
TOKEN = "recipe_options.token"
SIGNED = "https://host/a?year={}&X-Amz-Date={}&X-Amz-Signature={}"
texts = st.text("ab12", min_size=1, max_size=4)
secrets = st.one_of(
    st.builds("https://me:{}@host/a".format, texts),
    st.builds("https://host/a?token={}".format, texts),
    st.builds("api_key={}".format, texts),
    st.builds("{{}}/{}".format, texts),
)
values = st.one_of(
    secrets, st.lists(secrets, max_size=2), st.integers(0, 3), st.none(), st.just("...")
)


@pytest.fixture(autouse=True, scope="module")
def _cheap_hashes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recorded_config.COST, "n", 2)
        yield


def record(options, is_old=False):
    """The record of a config, as JSON gives it back."""
    config = {"recipe_options": options}
    hashes = None if is_old else hash_hidden(config)
    return RecordedConfig(*json.loads(json.dumps([redact_values(config), hashes])))


def with_token(value):
    return {"recipe_options": {"token": value}}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(values, values, st.sampled_from(["api_key", "source", "token"]))
def test_a_value_is_the_one_of_a_record_exactly_if_it_is_that_value(one, other, name):
    recorded = record({name: one})
    assert recorded.is_all({"recipe_options": {name: one}})
    assert recorded.is_all({"recipe_options": {name: other}}) == (one == other)


def test_a_record_has_neither_the_secret_nor_the_same_hash_twice():
    config = with_token("hunter2")
    first, second = hash_hidden(config), hash_hidden(config)
    assert "hunter2" not in json.dumps(first)
    assert first[0]["scrypt"] != second[0]["scrypt"]
    # a hash is a value of a record, and passes what takes secrets from one
    assert redact_values({"hidden": first}) == {"hidden": first}


@pytest.mark.parametrize(
    "text",
    [
        "https://host/a?year=2024&split=train",
        "https://host/a?versionId=null&list-type=2#part=3",
        "https://host/#/runs?page=3",
        "see https://host/a?country_code=ch&sort_key=x",
    ],
)
def test_a_query_is_no_secret(text):
    assert redact_url(text) == text


@pytest.mark.parametrize(
    "query", ["token=a", "key=a", "page_token=a", "sig=a", "q=9f86d081884c7d659a2feaa0c55ad015"]
)
def test_a_query_has_secrets(query):
    name = query.partition("=")[0]
    shown = redact_url(f"https://host/a?year=2024&{query}")
    assert shown == f"https://host/a?year=2024&{name}=..."


def test_a_new_signature_is_no_other_url():
    recorded = record({"source": SIGNED.format(2023, 1, "abc")})
    assert recorded.is_same("recipe_options.source", SIGNED.format(2023, 2, "def"))
    assert not recorded.is_same("recipe_options.source", SIGNED.format(2024, 1, "abc"))


def test_a_run_with_another_hidden_option_does_not_resume():
    def check(options, is_old=False):
        config = {"recipe_options": {"token": "word", "url": "https://host/?year=2023"}}
        checkpoint = {
            "config": redact_values(config),
            "progress": {"epoch": 1, "batch": 0},
            "data_fingerprint": "",
        }
        if is_old:
            checkpoint["config"]["recipe_options"]["url"] = "https://host/?year=..."
        else:
            checkpoint["hidden"] = hash_hidden(config)
        ours = TrainingConfig(recipe_options={**config["recipe_options"], **options})
        check_same_run(checkpoint, "x", ours, "")

    check({})
    for options, line in {
        ("token", "char"): rf"^{TOKEN}: expected '\.\.\.', with which x was written, got another",
        ("token", "..."): rf"^{TOKEN}: expected '\.\.\.', with which x was written, got another",
        ("url", "https://host/?year=2024"): r"^recipe_options\.url: expected .*2023.*, got .*2024",
    }.items():
        with raises_one_line(ConfigError, match=line):
            check(dict([options]))
    with raises_one_line(ConfigError, match=rf"^{TOKEN}: expected '\.\.\.', .* got another"):
        check({}, is_old=True)


def test_options_are_not_built_from_what_is_shown():
    recorded = record({"token": "char", "width": 3})
    with raises_one_line(ConfigError, match=rf"^{TOKEN}: expected the value .* give it by config"):
        restore_options(RECIPE, recorded, {})
    for other in ("word", "..."):
        with raises_one_line(ConfigError, match=rf"^{TOKEN}: expected .* got another value"):
            restore_options(RECIPE, recorded, {"token": other})
    assert restore_options(RECIPE, recorded, {"token": "char"}) == {"token": "char", "width": 3}
    # the record of version 0.1.0 has no hashes
    old = record({"token": "char", "width": 3}, is_old=True)
    with raises_one_line(ConfigError, match=f"^{TOKEN}: expected the value"):
        restore_options(RECIPE, old, {})
    with raises_one_line(ConfigError, match=rf"^{TOKEN}: expected .* got another"):
        restore_options(RECIPE, old, {"token": "char"})
    default = record({"token": "such as this default"})
    name = "tests.support.recipes.WithDefaultToken"
    assert restore_options(name, default, {}) == {"token": "such as this default"}


def card_of(options):
    config = {"recipe_options": options}
    shown = started(name=RECIPE, config=redact_values(config), hidden=hash_hidden(config))
    return run_card(RunState.of([shown, *whole_run()[1:], run_finished()]))


def test_predictions_ask_for_a_hidden_option_and_take_the_true_one_alone(tmp_path):
    """From a run card and from a champion, and in an output that is there."""
    torch.save({}, tmp_path / "state.pt")
    (tmp_path / CARD_JSON).write_bytes(card_files(card_of({"token": "char"}))[CARD_JSON])
    config = with_token("char")
    trained = manifest(recipe=RECIPE, config=redact_values(config), hidden=hash_hidden(config))
    store = ChampionStore(str(tmp_path / "champion"))
    store.promote((tmp_path / "state.pt").read_bytes(), trained, b"")
    for state in (tmp_path / "state.pt", tmp_path / "champion"):
        output = str(tmp_path / "output")
        with raises_one_line(ConfigError, match=f"^{TOKEN}: expected the value"):
            prediction.predict(RECIPE, str(state), "", output)
        with raises_one_line(ConfigError, match=f"^{TOKEN}: expected .* got another"):
            prediction.predict(RECIPE, str(state), "", output, config=with_token("word"))
        model = prediction.find_model(str(state))
        assert prediction.merge_options(RECIPE, model, {"token": "char"}) == {"token": "char"}

    made = {"recipe": RECIPE, "num_samples": 3, **redact_values(config)}
    storage, facts = Storage(str(tmp_path / "made")), {"recipe": RECIPE}
    storage.write(prediction.MANIFEST, json.dumps({**made, "hidden": hash_hidden(config)}).encode())
    prediction.check_output(storage, facts, config)
    with raises_one_line(ConfigError, match=f"^{TOKEN}: expected .* as of the predictions in"):
        prediction.check_output(storage, facts, with_token("word"))
    storage.write(prediction.MANIFEST, json.dumps(made).encode())
    with raises_one_line(ConfigError, match=f"^{TOKEN}: .* others need another output"):
        prediction.check_output(storage, facts, config)


def test_a_replay_asks_for_hidden_options_and_data(tmp_path, monkeypatch):
    config = {"gradient_accumulation": 1, **with_token("char")}
    origin = {"recipe": RECIPE, "num_ranks": 1, "num_threads": 1, "data": "https://...@host/a"}
    state = {"config": redact_values(config), "hidden": hash_hidden(config), "origin": origin}
    monkeypatch.setattr(
        "flyte_ddp.rehearsal.replayed_step.find_state", lambda *_: (0, False, state, [])
    )

    def run(job, *_):
        raise ConfigError(f"started with {job.program.name}")

    monkeypatch.setattr(replay, "driver", SimpleNamespace(run=run))
    words = [str(tmp_path), "--step", "1"]
    char = ["--config", json.dumps(with_token("char"))]
    for given_words, line in {
        (): f"^{TOKEN}: expected the value",
        ("--config", json.dumps(with_token("word"))): f"^{TOKEN}: expected .* got another",
        ("--config", '{"epochs": 3}'): "^--config: expected recipe_options alone",
        tuple(char): r"^--data: expected the place of the run's data.*@host/a",
        (*char, "--data", "3"): "^started with tests.support.recipes.WithToken",
    }.items():
        with raises_one_line(ConfigError, match=line):
            replay.main([*words, *given_words])
