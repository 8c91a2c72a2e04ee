"""A retraining promotes a better model or keeps the old one, with a reason, whatever fails."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from flyte_ddp.__main__ import main
from flyte_ddp.errors import ConfigError, StorageUnavailable
from flyte_ddp.flyte.failures import RecoverableError
from flyte_ddp.flyte.inputs import make_overrides
from flyte_ddp.flyte.retraining import Retraining
from flyte_ddp.flyte.task import open_task_run
from flyte_ddp.observers.reports.compared_run import read_runs
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.promotion import policy as challenges
from flyte_ddp.promotion.champion import ChampionStore, load_champion
from flyte_ddp.promotion.policy import Challenge, PromotionCriteria, RetrainingResult, judge, plan
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.storage.state_dict_file import from_bytes, pin_state
from flyte_ddp.task_run.execution import Execution, champions_of
from flyte_ddp.task_run.retraining import record_outcome
from tasks.retrain import keep_champion, plan_retraining
from tests.support.compared import make_card, make_history
from tests.support.emulators import s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.runs import new_run

TINY = "tests.support.recipes.Tiny"


# The rules, with states made by hand


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """data(source, recipe): the directory of prepared data; `source` is a seed."""
    directory = tmp_path_factory.mktemp("data")
    return lambda source="", recipe="Tiny": new_run(directory / recipe, recipe).data(source)


def percentile_bounds(differences):
    """The interval of a percentile bootstrap, by which the 17 held-out samples of Tiny decide."""
    values = torch.tensor(differences, dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(values), (1000, len(values)), generator=draws)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return tuple(values[chosen].mean(1).quantile(ends).tolist())


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """Let few samples decide: test_comparison.py tests how many are needed."""
    monkeypatch.setattr("flyte_ddp.promotion.comparison.find_bounds", percentile_bounds)


@pytest.fixture
def store(tmp_path):
    return ChampionStore(str(tmp_path / "champion"))


@pytest.fixture
def make(data):
    """make(source, **changes of the config): a challenge of Tiny."""

    def get(source="", recipe="Tiny", execution="", code_version="c1", **config):
        name = f"tests.support.recipes.{recipe}"
        return Challenge(
            recipe=name,
            config=config_of(name, config),
            directory=data(source, recipe),
            kickoff_time="2026-01-02T03:04:05Z",
            code_version=code_version,
            execution=execution,
        )

    return get


def model_state(scale, recipe="Tiny"):
    """A state file. At scale 0 the model gives each class a third, and the larger the scale the
    more it errs.
    """
    torch.manual_seed(0)
    model = get_recipe(f"tests.support.recipes.{recipe}").model()
    buffer = io.BytesIO()
    torch.save({name: scale * value for name, value in model.state_dict().items()}, buffer)
    return buffer.getvalue()


def spoiled(value):
    state = torch.load(io.BytesIO(model_state(1)), weights_only=True)
    state["0.bias"][3] = value
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def scale_of(store):
    """The scale at which the champion's state was made."""
    state, _ = store.load()
    fresh = torch.load(io.BytesIO(model_state(1)), weights_only=True)
    return round(float(state["0.weight"][0, 0] / fresh["0.weight"][0, 0]))


def test_the_first_challenger_is_promoted_with_its_origin_in_the_manifest(store, make):
    given = make(execution="f1-n2", epochs=5)
    assert plan(store, given, PromotionCriteria()) == challenges.Plan(
        "", "there is no champion yet"
    )
    result = judge(store, given, PromotionCriteria(), model_state(5))
    _, manifest = load_champion(store.url)

    assert (result.outcome, result.champion) == (RetrainingResult.PROMOTED, {})
    assert result.challenger["test_loss"] > 0
    note = json.loads(Path(given.directory, "data.json").read_text())
    expected = {
        "metrics": result.challenger,
        "data_fingerprint": note["fingerprint"],
        "recipe_version": note["recipe_version"],
        "data": "97 samples of noise, seed 0",
        "num_train_samples": 97,
        "num_test_samples": 17,
        "config": dataclasses.asdict(given.config),
        "recipe": TINY,
        "code_version": "c1",
        "execution": "f1-n2",
        "kickoff_time": "2026-01-02T03:04:05Z",
    }
    assert {name: getattr(manifest, name) for name in expected} == expected


def test_a_challenger_on_a_sample_of_the_data_counts_that_sample(store, make):
    given = make(sample_size=30)
    assert plan(store, given, PromotionCriteria(min_samples=31)).outcome == RetrainingResult.REFUSED
    judge(store, given, PromotionCriteria(), model_state(5))
    assert load_champion(store.url)[1].num_train_samples == 30


def test_the_margin_is_a_share_of_the_champions_loss_and_asked_of_the_intervals_lower_end(
    store, make
):
    judge(store, make(), PromotionCriteria(), model_state(5))
    measured = judge(store, make(), PromotionCriteria(margin=9.0), model_state(3))
    difference = measured.champion["test_loss"] - measured.challenger["test_loss"]
    low, high = measured.advantage
    assert low < difference < high
    assert f"with 95 % confidence it is better by {low:.6g} to {high:.6g}" in measured.reason
    share = low / measured.champion["test_loss"]
    assert 0 < share < 1
    for margin, outcome, scale in (
        (share + 1e-6, RetrainingResult.NOT_BETTER, 5),
        (share - 1e-6, RetrainingResult.PROMOTED, 3),
    ):
        judged = judge(store, make(), PromotionCriteria(margin=margin), model_state(3))
        assert (judged.outcome, scale_of(store)) == (outcome, scale)
    assert store.manifest().parent_metrics == judged.champion


@pytest.mark.long
def test_the_page_of_a_retraining_compares_its_night_with_the_nights_before(store, make):
    losses = [0.41, 0.40, 0.42, 0.41, 0.43, 0.41, 0.40, 0.58]
    for day, loss in enumerate(losses, 1):
        change = {"config": {"learning_rate": 0.1}} if loss == max(losses) else {}
        given = dataclasses.replace(
            make(),
            kickoff_time=f"2026-01-0{day}T03:00:00Z",
            card=make_card(make_history([loss], **change)),
        )
        result = judge(store, given, PromotionCriteria(), model_state(5))
    judge(store, given, PromotionCriteria(), model_state(5))  # the task's second attempt
    store.keep_night("2026-01-01T02", b"damaged")
    assert len(read_runs(store.url)) == len(losses)

    retraining = Retraining(TINY, store.url, "", PromotionCriteria(), "", "unchanged", "")
    execution = Execution("", "", is_local=True)
    page = record_outcome(execution, retraining, result)[2].render_fragment()
    assert "The newest night is worse than the noise of the 7 before: test_loss" in page
    assert "config: learning_rate 0.002 → 0.1" in page
    assert "Test loss of the runs over epochs" in page
    assert "What differs" in page
    page = record_outcome(execution, retraining, None)[2].render_fragment()
    assert "newest night" not in page


def test_another_figure_than_the_loss_may_decide(store, make):
    monitored = make(monitor={"metric": "accuracy", "mode": "max"})
    judge(store, monitored, PromotionCriteria(), model_state(5))
    result = judge(store, monitored, PromotionCriteria(margin=0), model_state(3))
    assert result.challenger["test_loss"] < result.champion["test_loss"]
    assert result.outcome == RetrainingResult.NOT_BETTER
    assert result.advantage[1] <= 0
    assert "the challenger's accuracy is" in result.reason


@pytest.mark.long
def test_the_evaluation_is_that_of_the_training_loop(tmp_path, make, finished_run):
    run = finished_run("Tiny", 2)
    given = dataclasses.replace(make(), directory=run.data())
    state = Path(run.result.finished.model_state_url).read_bytes()
    result = judge(ChampionStore(str(tmp_path / "champion")), given, PromotionCriteria(), state)

    last = run.result.epochs[-1]
    assert result.challenger["accuracy"] == last.metrics["accuracy"]
    assert result.challenger["test_loss"] == pytest.approx(last.test_loss, rel=1e-6)


@pytest.mark.parametrize(
    "state", [spoiled(float("nan")), spoiled(float("inf")), model_state(3e38)], ids=len
)
def test_a_challenger_that_is_not_finite_is_never_promoted(store, make, state):
    for _ in ("without a champion", "with one"):
        before = store.pointer()
        result = judge(store, make(seed=1), PromotionCriteria(), state)
        assert result.outcome == RetrainingResult.REFUSED
        assert "weights, or its loss on the held-out data, are not finite; " in result.reason
        assert store.pointer() == before
        judge(store, make(), PromotionCriteria(), model_state(5))


def damaged(store, name, damage):
    file = Path(store.url, "versions", store.in_use().version, name)
    damage(file)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model_state.pt", os.unlink),
        ("manifest.json", os.unlink),
        ("model_state.pt", lambda file: file.write_bytes(b"x")),
        ("manifest.json", lambda file: file.write_bytes(b"{}")),
    ],
)
def test_an_unusable_champion_is_neither_trained_against_nor_replaced(store, make, name, damage):
    judge(store, make(), PromotionCriteria(), model_state(3))
    damaged(store, name, damage)
    before = store.pointer()
    for decide in (plan, lambda *given: judge(*given, model_state(6))):
        with pytest.raises(
            ConfigError,
            match=(
                r"^champion: expected one that can be used, got: "
                rf".*({name}|a manifest)"
            ),
        ):
            decide(store, make(), PromotionCriteria())
    assert store.pointer() == before


def test_a_champion_whose_pointer_is_gone_is_missing_and_not_the_first(store, make):
    """Delete the oldest object, as a lifecycle rule does first."""
    judge(store, make(), PromotionCriteria(), model_state(3))
    judge(store, make(seed=1), PromotionCriteria(), model_state(6))
    Path(store.url, "champion.json").unlink()
    with pytest.raises(
        ConfigError,
        match=(
            r"^champion: expected one .*champion.json is missing. .*rollback URL "
            r"VERSION"
        ),
    ):
        plan(store, make(), PromotionCriteria())
    store.rollback(store.versions()[0].version)
    assert scale_of(store) == 3


def test_a_champion_of_another_kind_is_neither_trained_against_nor_replaced(store, make):
    judge(store, make(recipe="Normed"), PromotionCriteria(), model_state(1, "Normed"))
    before = store.pointer()
    for planned in (
        plan(store, make(), PromotionCriteria()),
        judge(store, make(), PromotionCriteria(), model_state(1)),
    ):
        assert planned.outcome == RetrainingResult.REFUSED
        assert "it is of recipe 'tests.support.recipes.Normed'" in planned.reason
        assert "a place of its own" in planned.reason
    assert store.pointer() == before


def test_a_champion_with_other_layers_is_incompatible_too_and_the_reason_names_them(store, make):
    narrow = make(recipe="Optional", recipe_options={"width": 8})
    model = get_recipe(narrow.recipe, {"width": 8}).model()
    torch.save(model.state_dict(), buffer := io.BytesIO())
    judge(store, narrow, PromotionCriteria(), buffer.getvalue())
    planned = plan(store, make(recipe="Optional"), PromotionCriteria())
    assert planned.outcome == RetrainingResult.REFUSED
    assert "other shapes at 0.weight (8, 8) instead of (16, 8)" in planned.reason


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        (PromotionCriteria(min_samples=98), "97 training samples, of at least 98 "),
        (
            PromotionCriteria(min_share=0.97),
            "97 training samples, .* and 0.97 .* of the champion's 103;",
        ),
    ],
)
def test_too_little_data_is_not_trained_on(store, make, data, criteria, expected):
    given = make(recipe="Normed")  # The recipe has 103 samples.
    judge(store, given, PromotionCriteria(), model_state(1, "Normed"))
    less = dataclasses.replace(given, directory=data("", "Tiny"))  # 97
    planned = plan(store, less, criteria)
    assert planned.outcome == RetrainingResult.REFUSED
    assert re.search(expected, planned.reason)
    assert not plan(store, less, PromotionCriteria(min_share=0.94)).outcome


def test_neither_the_champions_training_nor_a_lost_challenge_is_repeated(store, make):
    judge(store, make(), PromotionCriteria(), model_state(3))
    assert plan(store, make(), PromotionCriteria()).outcome == RetrainingResult.UNCHANGED
    for changed in (make("5"), make(epochs=9), make(code_version="c2")):
        assert not plan(store, changed, PromotionCriteria()).outcome
    judge(store, make("5"), PromotionCriteria(), model_state(6))
    planned = plan(store, make("5"), PromotionCriteria())
    assert planned.outcome == RetrainingResult.UNCHANGED
    assert planned.reason.endswith("not_better")
    for given, criteria in (
        (make("6"), PromotionCriteria()),
        (make("5"), PromotionCriteria(margin=0)),
        (make("5"), PromotionCriteria(start_from="scratch")),
    ):
        assert not plan(store, given, criteria).outcome


def test_another_hidden_option_is_another_training(store, make):
    def challenge(token, source=""):
        return make(source, "WithToken", recipe_options={"token": token})

    def outcome(*given):
        return plan(store, challenge(*given), PromotionCriteria()).outcome

    judge(store, challenge("char"), PromotionCriteria(), model_state(3, "WithToken"))
    judge(store, challenge("char", "5"), PromotionCriteria(), model_state(6, "WithToken"))
    for source in ("", "5"):  # The sources are the champion's own and the last challenge's.
        assert outcome("char", source) == RetrainingResult.UNCHANGED
        assert not outcome("word", source)
        assert not outcome("...", source)
    _, manifest = load_champion(store.url)
    assert manifest.config["recipe_options"]["token"] == "..."
    old = dataclasses.replace(manifest, hidden=None)  # An earlier version wrote no hidden options.
    store.promote(model_state(3, "WithToken"), old, store.pointer())
    assert not outcome("char")


def test_a_rollback_holds_until_it_is_released(store, make):
    judge(store, make(), PromotionCriteria(), model_state(20))
    judge(store, make("5"), PromotionCriteria(), model_state(0))
    first = store.rollback().version
    for source in ("5", "6"):  # Source 5 has the same data; source 6 has another night's.
        planned = plan(store, make(source), PromotionCriteria())
        assert planned.outcome == RetrainingResult.HELD
        expected = "a rollback at 20.*Z keeps its version in use; release it by .*promotion release"
        assert re.match(expected, planned.reason)
        # A training that had begun before, or the retry of the one that was rolled back.
        assert (
            judge(store, make(source), PromotionCriteria(), model_state(0)).outcome
            == RetrainingResult.HELD
        )
    assert store.in_use().version == first
    assert store.release()
    assert not store.release()
    assert not plan(store, make("6"), PromotionCriteria()).outcome


def test_a_champion_with_a_loss_that_is_not_finite_loses(store, make):
    given = make()
    judge(store, given, PromotionCriteria(), model_state(1))
    manifest = dataclasses.replace(store.manifest(), metrics={})
    store.promote(model_state(3e38), manifest, store.pointer())
    result = judge(store, make("5"), PromotionCriteria(), model_state(6))
    assert (result.outcome, result.champion) == (RetrainingResult.PROMOTED, {})
    assert result.reason == "the champion's loss on the same held-out data is not finite"


def plan_challenge(store, challenge, **inputs):
    """Plan the retraining that would make this challenge, with criteria that every model meets."""
    criteria = {"start_from": "champion", "margin": 0.0, "min_samples": 1, "min_share": 0.0}
    return plan_retraining(
        kickoff_time=datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),
        champion=store.url,
        recipe=challenge.recipe,
        config=make_overrides(dataclasses.asdict(challenge.config)),
        source=None,
        cluster=None,
        train_on="one_node",
        **{**criteria, **inputs},
    )


def test_a_challenger_that_starts_from_no_champion_starts_from_the_given_state(store, make):
    challenge = make()

    given = dataclasses.replace(challenge.config, initial_model_state="/given.pt")
    challenge = dataclasses.replace(challenge, config=given)

    def initial_model_state(**criteria):
        return plan_challenge(store, challenge, **criteria).config.initial_model_state

    assert initial_model_state() == "/given.pt"
    judge(store, make("5"), PromotionCriteria(), model_state(3))
    assert initial_model_state().startswith(store.url)
    assert initial_model_state(start_from="scratch") == "/given.pt"


def starting_from(state, challenge):
    config = dataclasses.replace(challenge.config, initial_model_state=state)
    return dataclasses.replace(challenge, config=config)


def test_another_initial_state_is_another_challenge(store, make, tmp_path):
    (file := tmp_path / "given.pt").write_bytes(model_state(2))
    first, scratch = pin_state(str(file)), PromotionCriteria(start_from="scratch")
    given = starting_from(first, make())
    judge(store, given, scratch, model_state(5))
    assert store.manifest().initial_state == first
    assert plan(store, given, scratch).outcome == RetrainingResult.UNCHANGED
    assert not plan(store, make(), scratch).outcome  # This challenger starts from fresh weights.

    file.write_bytes(model_state(3))
    other = starting_from(pin_state(str(file)), given)
    planned = plan(store, other, scratch)
    assert planned.outcome == ""
    assert judge(store, other, scratch, model_state(6)).outcome == RetrainingResult.NOT_BETTER
    # The last challenge had the same inputs.
    assert plan(store, other, scratch).outcome == RetrainingResult.UNCHANGED
    # The champion's own training had the same inputs.
    assert plan(store, given, scratch).outcome == RetrainingResult.UNCHANGED
    # Criteria without options start from the champion's weights.
    assert plan(store, other, PromotionCriteria()).outcome == RetrainingResult.UNCHANGED


@pytest.mark.parametrize(
    ("scale", "outcome"), [(3, RetrainingResult.PROMOTED), (6, RetrainingResult.NOT_BETTER)]
)
def test_the_second_of_two_first_challengers_is_compared_with_the_first(
    store, make, monkeypatch, scale, outcome
):
    """The first promotes and records it after the other has seen that there is no champion."""
    pointer = ChampionStore.pointer

    def look_and_be_late(self):
        monkeypatch.setattr(ChampionStore, "pointer", pointer)
        seen = pointer(self)
        assert (
            judge(store, make(), PromotionCriteria(), model_state(5)).outcome
            == RetrainingResult.PROMOTED
        )
        return seen

    monkeypatch.setattr(ChampionStore, "pointer", look_and_be_late)
    result = judge(ChampionStore(store.url), make(seed=1), PromotionCriteria(), model_state(scale))
    assert (result.outcome, scale_of(store)) == (
        outcome,
        3 if outcome == RetrainingResult.PROMOTED else 5,
    )
    assert len(result.advantage) == 2
    assert len(store.versions()) == 1 + (outcome == RetrainingResult.PROMOTED)


def test_a_challenger_is_measured_against_a_champion_promoted_meanwhile(store, make):
    patch = pytest.MonkeyPatch()
    judge(store, make(), PromotionCriteria(), model_state(6))
    promote = ChampionStore.promote

    def promote_second(self, *arguments):
        patch.undo()
        judge(ChampionStore(store.url), make(seed=9), PromotionCriteria(), model_state(3))
        return promote(self, *arguments)

    patch.setattr(ChampionStore, "promote", promote_second)
    result = judge(store, make(seed=1), PromotionCriteria(), model_state(5))

    # The model is not better than 3, though better than 6.
    assert result.outcome == RetrainingResult.NOT_BETTER
    assert scale_of(store) == 3
    assert len(store.versions()) == 2


@pytest.mark.parametrize("has_champion", [False, True])
def test_a_retry_after_a_promotion_writes_the_record_that_was_not_written(
    store, make, monkeypatch, has_champion
):
    if has_champion:
        judge(store, make(), PromotionCriteria(), model_state(5))
    given = make(execution="f2-n3", seed=1)
    record = ChampionStore.record
    lost = []

    def cut(store, name, **values):
        lost.append(values)
        raise StorageUnavailable("champion: the pod is gone")

    monkeypatch.setattr(ChampionStore, "record", cut)
    with pytest.raises(StorageUnavailable):
        judge(store, given, PromotionCriteria(), model_state(3))
    monkeypatch.setattr(ChampionStore, "record", record)
    result = judge(store, given, PromotionCriteria(), model_state(3))

    (expected,) = lost
    written = store.last("last_challenge.json")
    same = expected.keys() - {"reason"}
    assert {name: written[name] for name in same} == json.loads(
        json.dumps({name: expected[name] for name in same})
    )
    assert (result.outcome, result.champion) == (RetrainingResult.PROMOTED, expected["champion"])
    assert len(store.versions()) == 1 + has_champion  # nothing is promoted again
    other = judge(store, make(execution="f3-n3"), PromotionCriteria(), model_state(3))
    assert other.outcome == RetrainingResult.NOT_BETTER
    os.unlink(Path(store.url, "champion.json"))
    # This run is not the first one.
    with pytest.raises(ConfigError, match="champion.json is missing"):
        judge(store, make(seed=2), PromotionCriteria(), model_state(1))


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("start_from", "here", "one of champion, scratch"),
        ("margin", -0.1, "a finite number of at least 0"),
        ("margin", float("nan"), "a finite number of at least 0"),
        ("min_samples", 0, "a whole number of at least 1"),
        ("min_share", 1.5, "a finite number of at least 0 and of at most 1"),
    ],
)
def test_terms_out_of_range_are_refused_in_one_line(field, value, accepted):
    with pytest.raises(ConfigError, match=f"^{field}: expected {accepted}, got "):
        PromotionCriteria(**{field: value})


# The workflow, by its launch plan


@pytest.fixture(scope="module")
def retrain(tmp_path_factory):
    """retrain(**inputs): the outputs of a run of the launch plan on digits, one process, one
    champion.
    """
    place = str(tmp_path_factory.mktemp("champion"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        from workflows.retrain import RETRAIN

        def run(champion=place, config=(), **inputs):
            from flyte_ddp.flyte.inputs import TrainingOverrides

            return RETRAIN(
                kickoff_time=datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),
                champion=champion,
                config=TrainingOverrides(**{"epochs": 1, "global_batch_size": 256, **dict(config)}),
                num_processes=1,
                **inputs,
            )

        run.place = place
        yield run


def status(store, capfd, max_age):
    """Exit status and last clause of `flyte-ddp promotion status`."""
    capfd.readouterr()
    code = main(["promotion", "status", store.url, "--max-age", max_age])
    return code, "".join(capfd.readouterr()).strip().rpartition("; ")[2]


@pytest.mark.long
def test_retrainings_promote_the_first_and_then_only_better_models(retrain, capfd, tmp_path):
    first = retrain(output=str(tmp_path / "first"))
    assert first.outcome == "promoted"
    challengers = {"export", "history.jsonl", "model_state.pt", "outputs.json", "report.html"}
    own = {"retraining.html", "retraining.json"}
    assert set(os.listdir(tmp_path / "first")) == challengers | own
    assert "epoch 1/1: train loss" in "".join(capfd.readouterr())

    store = ChampionStore(retrain.place)
    record = store.last("last_run.json")
    assert record["outcome"] == "promoted"
    store.storage.write(
        "last_run.json", json.dumps({**record, "ended_at": "2026-01-02T03:00:00Z"}).encode()
    )
    late = "expected one within 26h: look at the executions of the launch plan"
    assert status(store, capfd, "26h") == (1, late)

    same = retrain(output=str(tmp_path / "same"))
    assert same.outcome == "unchanged"
    assert set(os.listdir(tmp_path / "same")) == own
    kept = json.loads((tmp_path / "same" / "retraining.json").read_text())
    assert (kept["outcome"], kept["reason"], kept["champion"]) == (
        "unchanged",
        same.reason,
        first.champion,
    )
    assert status(store, capfd, "26h") == (0, f"{first.champion} is in use")
    assert "epoch" not in "".join(capfd.readouterr())  # The task did not train.

    worse = retrain(config={"learning_rate": 1e-6}, start_from="scratch")
    assert worse.outcome == "not_better"
    assert worse.champion == same.champion == first.champion
    assert worse.metrics["challenger_test_loss"] > worse.metrics["champion_test_loss"]
    assert worse.metrics["champion_test_loss"] == pytest.approx(
        first.metrics["challenger_test_loss"]
    )

    better = retrain(config={"epochs": 2})
    assert better.outcome == "promoted"
    assert better.champion != first.champion
    assert better.metrics["challenger_accuracy"] > better.metrics["champion_accuracy"]

    assert same.export is None  # nothing was trained
    cards = [
        json.loads(Path(str(each.export), "run_card.json").read_text())
        for each in (first, worse, better)
    ]
    assert [card["origin"]["parent_champion"] for card in cards] == [
        None,
        first.champion,
        first.champion,
    ]
    assert [bool(card["origin"]["initial_model_state"]) for card in cards] == [False, False, True]
    kept = store.storage.read(f"versions/{better.champion}/run_card.json")
    assert kept == Path(str(better.export), "run_card.json").read_bytes()
    exported = from_bytes(Path(str(better.export), "model_state.safetensors").read_bytes())
    assert all(torch.equal(exported[name], value) for name, value in store.load()[0].items())
    page = Path(str(better.report)).read_text()
    for expected in (
        "Retraining digits",
        "promoted: on the same held-out data",
        better.champion,
        "2026-01-02 03:00",
    ):
        assert expected in page


def test_an_outage_while_the_report_is_made_is_recoverable(store, monkeypatch):
    away = Mock(side_effect=StorageUnavailable("champion: s3://bucket could not be reached"))
    monkeypatch.setattr(ChampionStore, "in_use", away)
    kept = Retraining("digits", store.url, "", PromotionCriteria(), "", "unchanged", "nothing new")
    with pytest.raises(RecoverableError, match="champion: s3://bucket could not be reached"):
        keep_champion(retraining=kept)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"champion": ""}, "champion: expected a directory or a URL in a local run, got ''"),
        ({"train_on": "moon"}, "train_on: expected one of one_node, cluster, got 'moon'"),
        ({"start_from": "zero"}, "start_from: expected one of champion, scratch, got 'zero'"),
        (
            {"output": "Makefile"},
            "output: expected a directory that this process may write, got 'Makefile': File exists",
        ),
        (
            {"champion": "/proc/none"},
            "champion: expected a place that this process may use, got /proc/none",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(retrain, inputs, expected, capfd):
    with pytest.raises(Exception, match=expected):
        retrain(recipe=TINY, **inputs)
    assert "epoch" not in "".join(capfd.readouterr())


def test_on_flyte_the_outputs_belong_to_flyte(store, make, monkeypatch):
    monkeypatch.setattr("flyte_ddp.flyte.outputs.is_flyte_task", lambda: True)
    with pytest.raises(
        Exception, match="output: expected none in a run on Flyte, .* got 'runs/first'"
    ):
        plan_challenge(store, make(), output="runs/first")
    with pytest.raises(
        Exception, match="output: expected none in a run on Flyte, .* got 'runs/second'"
    ):
        open_task_run(Report(), "digits", "", "runs/second").__enter__()


def test_the_default_champion_is_shared_and_outside_the_raw_output_prefix(bucket):
    champions = champions_of(f"{bucket}/data", "project", "production")
    execution = Execution(f"{bucket}/data/checkpoints", "f1-n2", False, champions)
    place = execution.default_champion("digits")
    assert place == f"{bucket}/champions/project/production/digits"
