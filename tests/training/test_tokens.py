"""The tokens that a run has seen, and runs that end after a number of tokens."""

from __future__ import annotations

import pytest

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.training.progress import count_steps
from tests.support.errors import raises_one_line
from tests.support.recipes import Tiny
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

COUNTED = "tests.training.test_tokens.Counted"
# 97 samples of 5 tokens, in nine steps of 12 and a last one
CASES = [(1, 1), (60, 1), (61, 2), (96 * 5 + 1, 9), (97 * 5 + 1, 10), (97 * 10, 18), (9999, 18)]


class Counted(Tiny):
    def tokens_per_sample(self):
        return 5


class Scheduled(Counted):
    def schedule(self, optimizer, config, num_steps):
        return lambda step: 1.0


def test_the_steps_of_a_run_are_those_that_reach_the_tokens():
    for max_tokens, expected in CASES:
        config = TrainingConfig(global_batch_size=12, epochs=2, max_tokens=max_tokens)
        assert count_steps(97, 5, config) == expected
    assert count_steps(97, 0, TrainingConfig(global_batch_size=12, epochs=2)) == 18
    with raises_one_line(ConfigError, match="max_tokens: expected 0 for a recipe without .*, got"):
        count_steps(97, 0, config)


@pytest.mark.parametrize(
    ("max_tokens", "steps", "seen"),
    [(5 * 49, [5], [60 * 5]), (5 * 110, [9, 11], [97 * 5, 121 * 5])],
)
def test_a_run_ends_with_an_evaluation_where_it_has_seen_its_tokens(
    max_tokens, steps, seen, tmp_path
):
    config = {"max_tokens": max_tokens, "epochs": 9, "schedule": "cosine"}
    run = new_run(tmp_path, COUNTED)
    with pytest.raises(StopRequested):  # The last evaluation is stopped.
        new_trainer(run, stop_after=steps[-1] + 5 * len(steps) - 4, **config).fit()
    resumed = new_trainer(run, **config)
    resumed.checkpoints.resume()
    assert resumed.state.progress.step == steps[-1]
    assert not resumed.state.is_done
    epochs = resumed.fit().epochs
    assert [each.step for each in epochs] == steps
    assert [each.metrics["tokens_seen"] for each in epochs] == seen
    # Flyte takes no int where a float is declared.
    assert {type(value) for each in epochs for value in each.metrics.values()} == {float}
    assert epochs[-1].metrics["tokens_per_second"] == 5 * epochs[-1].samples_per_second
    assert epochs[-1].learning_rate < 0.1 * resumed.parallelism.config.learning_rate
    again = new_trainer(run, **config)
    again.checkpoints.resume()
    assert again.state.is_done
    more = new_trainer(run, **{**config, "max_tokens": max_tokens + 60})
    more.checkpoints.resume()
    assert [each.step for each in more.fit().epochs] == [*steps, steps[-1] + 1]


def test_a_schedule_of_ones_own_keeps_its_length(tmp_path):
    run = new_run(tmp_path, "tests.training.test_tokens.Scheduled")
    config = {"schedule": "own", "epochs": 2}
    new_trainer(run, max_tokens=60, **config).fit()
    with raises_one_line(ConfigError, match="max_tokens: expected 60, with which .*, got 120"):
        new_trainer(run, max_tokens=120, **config).checkpoints.resume()
