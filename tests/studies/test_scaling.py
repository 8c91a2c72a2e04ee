"""The scaling study: its arithmetic on numbers with a known answer, and one real study of two world
sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import pandas
import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, GangLost
from flyte_ddp.events import RunStarted, RunState
from flyte_ddp.events.history import read_history
from flyte_ddp.events.intervals import student_quantile
from flyte_ddp.flyte.inputs import ClusterInput, TrainingOverrides
from flyte_ddp.observers.reports.drawing import to_svg
from flyte_ddp.recipes import get_recipe
from flyte_ddp.storage.state_dict_file import pin_state
from flyte_ddp.studies import runner
from flyte_ddp.studies.plots import scaling_panels
from flyte_ddp.studies.results import FINISHED, TrialRun
from flyte_ddp.studies.runner import check_trials, resize_cluster
from flyte_ddp.studies.scaling import (
    Study,
    build_scaling_table,
    by_world_size,
    estimate,
)
from flyte_ddp.studies.search import Trial, build_trials, expand_world_sizes
from tests.support import sample_run
from tests.support.errors import raises_one_line

STEPS = sample_run.STEPS_PER_EPOCH


def run_of(
    world_size, step_seconds, losses=(2.0, 1.0, 0.5), rate=2e-3, batch_per_rank=0, **changes
):
    """A finished trial of as many epochs as there are `losses`, each of 50 steps, with a global
    batch of 128.
    """
    started = sample_run.started(len(losses), world_size)
    batch = {"global_batch_size": batch_per_rank * world_size} if batch_per_rank else {}
    started = dataclasses.replace(
        started, config={**started.config, "learning_rate": rate, **batch}, **changes
    )
    epochs = [
        dataclasses.replace(
            sample_run.epoch(number, world_size),
            test_loss=loss,
            seconds=STEPS * step_seconds,
            rank_wait_seconds=[0.1 * step_seconds, 0.3 * step_seconds],
            rank_overlap_seconds=[0.05 * step_seconds] * 2,
        )
        for number, loss in enumerate(losses, start=1)
    ]
    varied = {"batch_size_per_rank": batch_per_rank} if batch_per_rank else {}
    values = {"learning_rate": rate, **varied, "world_size": world_size}
    state = RunState(
        False, started=started, epochs=epochs, finished=sample_run.finished(len(losses))
    )
    config = TrainingConfig(global_batch_size=started.config["global_batch_size"])
    return TrialRun(Trial(world_size, values, {}, config, world_size), "", FINISHED, state)


def test_speed_up_and_efficiency_are_over_the_smallest_world_size():
    disturbed = run_of(4, 0.04)
    disturbed.epochs[0] = dataclasses.replace(disturbed.epochs[0], seconds=60.0)
    one, two, four = Study([disturbed, run_of(1, 0.1), run_of(2, 0.0625)]).rows
    assert [row.world_size for row in (one, two, four)] == [1, 2, 4]
    assert (one.speed_up, one.efficiency) == (1, 1)
    assert (two.speed_up, two.efficiency) == pytest.approx((1.6, 0.8))
    assert (four.speed_up, four.efficiency) == pytest.approx((2.5, 0.625))
    assert [row.batch_size_per_rank for row in (one, two, four)] == [128, 64, 32]
    assert four.samples_per_second == pytest.approx(60_000 / (STEPS * 0.04))
    two, four = Study([run_of(4, 0.05), run_of(2, 0.08)]).rows
    assert (two.speed_up, two.efficiency) == (1, 1)
    assert (four.speed_up, four.efficiency) == pytest.approx((1.6, 0.8))


def test_repeats_are_one_point_with_the_interval_of_students_t():
    runs = [run_of(size, seconds) for size, seconds in ((1, 0.1), (1, 0.1), (2, 0.05), (2, 0.0625))]
    for number, run in enumerate(runs):
        run.trial.values["seed"] = number % 2
    study = Study(runs)
    assert list(study.series) == [()]  # the seed is none of what is compared
    assert [row.speed_up for row in study.rows] == pytest.approx([1, 1, 2, 1.6])
    points = by_world_size(study.rows)
    assert [len(rows) for rows in points.values()] == [2, 2]
    speed_up = estimate([row.speed_up for row in points[2]])
    # scipy.stats.t.interval(0.95, 1, numpy.mean([2, 1.6]), scipy.stats.sem([2, 1.6])) is 1.8 -+
    # 2.5412
    assert (speed_up.mean, speed_up.half_width) == pytest.approx((1.8, 2.5412), rel=1e-3)
    assert f"{speed_up:.2f}" == "1.80 ± 2.54"
    assert f"{estimate([1.8]):.2f}" == "1.80"
    _, panels = scaling_panels(study)
    assert "2 ranks 1.8 ± 2.541" in panels[0].summary
    assert all("<svg" in to_svg(panel) for panel in panels)


def test_repeats_are_seeds_of_every_combination_and_far_from_each_other():
    choices = expand_world_sizes(TrainingConfig(seed=3), [1, 2], repeats=2)
    assert [(choice["seed"], choice["world_size"]) for choice in choices] == [
        (3, 2),
        (3, 1),
        (4, 2),
        (4, 1),
    ]
    assert expand_world_sizes(TrainingConfig(), [1, 2]) == [{"world_size": 2}, {"world_size": 1}]
    with pytest.raises(
        ConfigError, match="^repeats: expected a whole number of at least 1, got 0$"
    ):
        expand_world_sizes(TrainingConfig(), [1, 2], repeats=0)


def test_learning_rates_are_compared_among_themselves():
    study = Study(
        [run_of(1, 0.1), run_of(2, 0.05), run_of(1, 0.3, rate=0.1), run_of(2, 0.2, rate=0.1)]
    )
    assert [study.describe(values) for values in study.series] == [
        "learning_rate 0.002",
        "learning_rate 0.1",
    ]
    assert [row.learning_rate for row in study.rows] == [2e-3, 2e-3, 0.1, 0.1]
    assert [row.speed_up for row in study.rows] == pytest.approx([1, 2, 1, 1.5])


def test_time_to_target_is_that_of_the_first_epoch_that_reaches_it():
    runs = [run_of(1, 0.1, (2.0, 1.0, 0.4)), run_of(2, 0.05, (2.0, 0.6, 0.7))]
    study = Study(runs)
    assert study.target_loss == 0.6  # the worst of the best
    assert [row.seconds_to_target for row in study.rows] == pytest.approx([15.0, 5.0])
    assert [row.seconds_to_target for row in Study(runs, target_loss=2.0).rows] == pytest.approx(
        [5.0, 2.5]
    )
    assert [row.seconds_to_target for row in Study(runs, target_loss=0.5).rows] == [15.0, None]


def test_waiting_and_hours_are_those_of_all_ranks():
    (row,) = Study([run_of(2, 0.1, num_threads=3)]).rows
    assert (row.wait_share, row.overlap_share) == pytest.approx((0.2, 0.05))
    assert row.device_hours == pytest.approx(2 * 3 * 3 * STEPS * 0.1 / 3600)
    # DDP times a few steps of the last epoch. They may be slower than the steps of the median
    # epoch.
    run = run_of(2, 0.1)
    run.epochs[-1] = dataclasses.replace(run.epochs[-1], rank_wait_seconds=[0.3, 0.3])
    assert Study([run]).rows[0].wait_share == pytest.approx(0.3 / 0.305)
    study = Study([run_of(2, 0.1, num_threads=3, device="NVIDIA H200")])
    assert study.rows[0].device_hours == pytest.approx(2 * 3 * STEPS * 0.1 / 3600)
    assert "gpu_hours" in build_scaling_table(study)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"world_sizes": [2]}, "world_sizes: expected two or more, got [2]"),
        (
            {"world_sizes": [1, 1]},
            "world_sizes: expected different finite numbers above 0, got [1, 1]",
        ),
        (
            {"world_sizes": [0, 1]},
            "world_sizes: expected different finite numbers above 0, got [1, 0]",
        ),
        ({"world_sizes": [1, 3]}, "global_batch_size: expected a multiple of 3, got 32 (3 ranks;"),
        (
            {"learning_rates": [0.1, 0.0]},
            "learning_rates: expected different finite numbers above 0, got [0.1, 0.0]",
        ),
        (
            {"learning_rates": [0.1, 0.1]},
            "learning_rates: expected different finite numbers above 0, got [0.1, 0.1]",
        ),
        (
            {"batch_sizes_per_rank": [0]},
            "batch_sizes_per_rank: expected different finite numbers above 0, got [0]",
        ),
        (
            {"sample_sizes": [9, 9]},
            "sample_sizes: expected different finite numbers above 0, got [9, 9]",
        ),
        ({"target_loss": -1.0}, "target_loss: expected a finite number of at least 0, got -1.0"),
        (
            {"target_loss": float("nan")},
            "target_loss: expected a finite number of at least 0, got nan",
        ),
        (
            {"config": TrainingConfig(parallel="fsdp")},
            "config.parallel: expected ddp in a scaling study, got 'fsdp'",
        ),
    ],
)
def test_an_impossible_study_is_refused_before_anything_starts(changes, expected):
    arguments = {"config": TrainingConfig(), "world_sizes": [1, 2], "target_loss": 0.0}
    cluster = ClusterConfig(kind="local", num_nodes=3)
    with raises_one_line(ConfigError, match="^" + re.escape(expected)):
        check_trials(
            build_trials("digits", {}, expand_world_sizes(**{**arguments, **changes})), cluster
        )


def test_a_study_has_every_combination_and_starts_with_the_largest_world_size():
    axes = {"learning_rates": [0.1], "batch_sizes_per_rank": [32, 64], "sample_sizes": [500]}
    trials = build_trials(
        "digits", {"epochs": 2}, expand_world_sizes(TrainingConfig(), [1, 4, 2], **axes)
    )

    assert [(trial.values["batch_size_per_rank"], trial.world_size) for trial in trials] == [
        (32, 4),
        (32, 2),
        (32, 1),
        (64, 4),
        (64, 2),
        (64, 1),
    ]
    assert [trial.config.global_batch_size for trial in trials] == [128, 64, 32, 256, 128, 64]
    assert str(trials[1]) == (
        "trial 2 (learning_rate 0.1, batch_size_per_rank 32, sample_size 500, world_size 2)"
    )
    assert trials[1].overrides == {
        "epochs": 2,
        "learning_rate": 0.1,
        "sample_size": 500,
        "global_batch_size": 64,
    }


def test_a_world_size_takes_one_node_or_as_many_as_it_fills():
    cluster = ClusterConfig(kind="local", num_nodes=9, processes_per_node=4, min_nodes=2)
    resize = functools.partial(resize_cluster, cluster)
    found = [
        (each.num_nodes, each.processes_per_node, each.min_nodes) for each in map(resize, (1, 3))
    ]
    assert found == [(1, 1, 0), (1, 3, 0)]
    assert [(each.num_nodes, each.ranks_per_node) for each in map(resize, (4, 12))] == [
        (1, 4),
        (3, 4),
    ]
    with pytest.raises(
        ConfigError,
        match=(
            "^world_sizes: expected at most 4 .ranks per node. or a multiple of "
            "it, such as 4, got 6"
        ),
    ):
        resize_cluster(cluster, 6)
    gpus = resize_cluster(ClusterInput(kind="kubernetes", gpus_per_node=8), 2)
    assert (gpus.num_nodes, gpus.ranks_per_node, gpus.gpus_per_node) == (1, 2, 8)
    trials = build_trials("digits", {"backend": "nccl"}, [{"world_size": 2}])
    with pytest.raises(ConfigError, match="^backend: expected auto or gloo for ranks without GPUs"):
        check_trials(trials, cluster)


def test_every_figure_of_a_study_has_its_panel():
    meaning, (speed_up, *_) = scaling_panels(Study([run_of(1, 0.1), run_of(2, 0.06)]))
    assert (meaning, speed_up.summary) == ("", "Speed-up by world size: 1 rank 1, 2 ranks 1.667")
    assert ">ideal<" in to_svg(speed_up)
    runs = [run_of(1, 0.1), run_of(2, 0.06), run_of(1, 0.1, rate=0.1), run_of(2, 0.06, rate=0.1)]
    meaning, found = scaling_panels(Study(runs))
    assert meaning == "1: learning_rate 0.002; 2: learning_rate 0.1"
    assert ">1<" in to_svg(found[2])
    assert scaling_panels(Study([])) == ("", [])


# --- One real study
# --------------------------------------------------------------------------------------------------

TINY = "tests.support.recipes.Tiny"


def study(checkpoints, **changes):
    """The study of two world sizes, which start from the weights that fresh models have."""
    from workflows.scaling import scaling_wf

    initial_state = Path(f"{checkpoints}.pt")
    torch.manual_seed(TrainingConfig().seed)
    torch.save(get_recipe(TINY).model().state_dict(), initial_state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        inputs = {
            "recipe": TINY,
            "config": TrainingOverrides(initial_model_state=str(initial_state)),
            "world_sizes": [1, 2],
            # a busy machine's workers are slow, not lost
            "cluster": ClusterInput(kind="local", node_timeout=60),
            "checkpoints": str(checkpoints),
        }
        return scaling_wf(**{**inputs, **changes})


@pytest.mark.long
def test_a_study_trains_each_world_size_alike_and_times_it(tmp_path):
    outputs = study(tmp_path / "study")
    one, two = pandas.read_csv(outputs.csv.path).to_dict("records")
    assert [(row["world_size"], row["batch_size_per_rank"]) for row in (one, two)] == [
        (1, 12),
        (2, 6),
    ]
    assert one["final_test_loss"] == pytest.approx(two["final_test_loss"], rel=1e-4)
    assert two["speed_up"] == pytest.approx(one["step_seconds"] / two["step_seconds"])
    assert (one["wait_share"], two["wait_share"] > 0) == (0, True)
    found = read_history(outputs.history.path)
    starts = [event for event in found if isinstance(event, RunStarted)]
    assert [event.config["initial_model_state"] for event in starts] == [
        pin_state(f"{tmp_path}/study.pt")
    ] * 2
    assert len({event.num_threads for event in starts}) == 1
    page = Path(outputs.report.path).read_text()
    assert "the same global batch of 12 samples" in page
    assert page.count('class="panel"') == 8


def test_the_interval_of_repeats_is_that_of_students_distribution():
    """Quantiles of scipy.stats.t.ppf(0.975, n). The quantiles for few repeats are in a table."""
    known = {1: 12.70620, 2: 4.30265, 3: 3.18245, 9: 2.26216, 10: 2.22814, 11: 2.20099}
    for freedom, quantile in known.items():
        assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-6)
    for freedom, quantile in {12: 2.17881, 19: 2.09302, 99: 1.98422, 1000: 1.96234}.items():
        assert student_quantile(freedom) == pytest.approx(quantile, rel=0.001)


def test_trials_are_reused_only_if_nothing_differs():
    config = TrainingConfig()
    identities = {
        json.dumps(
            Trial(1, {}, {}, dataclasses.replace(config, **changes), size, recipe).identity([data])
        )
        for recipe, changes, size, data in (
            (TINY, {}, 2, "one"),
            (TINY, {}, 1, "one"),
            (TINY, {}, 2, "other"),
            (TINY, {"epochs": 2}, 2, "one"),
            ("digits", {}, 2, "one"),
        )
    }
    assert len(identities) == 5


@pytest.mark.long
def test_a_failed_trial_ends_the_study_and_no_other_starts(tmp_path, monkeypatch):
    started = []

    def fail(job, *rest, **options):
        started.append(job)
        raise GangLost("the gang was lost 4 times")

    monkeypatch.setattr(runner.driver, "run", fail)
    with pytest.raises(FlyteRecoverableException, match="the gang was lost 4 times"):
        study(tmp_path)
    assert len(started) == 1
