"""The arithmetic and the table of the benchmarks. Nothing is measured here."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import soak
from benchmarks.counting import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLES, Counting
from benchmarks.measure import (
    MeasurementError,
    Result,
    Row,
    Variant,
    compare,
    outcome_of,
    ratios,
    run,
    show_rows,
    table,
    timed_to_loss,
)
from benchmarks.recovery import __main__ as recovery
from benchmarks.recovery.__main__ import Suite
from benchmarks.recovery.__main__ import table as recovery_table
from benchmarks.recovery.faults import FAULTS, Moment, Outcome, damage, drain_all, seconds_to_next_step
from benchmarks.recovery.systems import Ours, System, Task
from benchmarks.recovery.workload import Step, longest_pause, num_redone
from benchmarks.soak import Faults, Nodes, _job, lost_and_doubled
from benchmarks.text import num_epochs_within, quality
from flyte_ddp.launch import driver
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.recipes.prepare import prepare_data
from tests.support.runs import new_run

OURS, THEIRS = Variant("ours", ("true",), 1), Variant("theirs", ("true",), 1)
THROUGHPUT = Row("throughput / the floor", "samples_per_second", OURS, THEIRS, ">= 0.95")


def outcomes(*pairs):
    return [({"samples_per_second": ours}, {"samples_per_second": theirs}) for ours, theirs in pairs]


def printing(text, name="printer", needs=""):
    return Variant(name, (sys.executable, "-c", f"print({text!r})"), 1, needs)


def test_each_rounds_ratio_is_of_that_rounds_two_runs():
    assert ratios(Result(THROUGHPUT, outcomes((90, 100), (30, 20)))) == [0.9, 1.5]


def test_the_table_has_the_median_and_the_range_of_the_ratios_and_the_median_of_each_side():
    result = Result(THROUGHPUT, outcomes((900, 1000), (3000, 2000), (2000, 2000)))
    header, rule, line = table([result]).splitlines()
    assert header.count("|") == rule.count("|") == line.count("|")
    assert line == (
        "| throughput / the floor | >= 0.95 | **1.00** (0.90 to 1.50) | 2,000 samples/s | 2,000 samples/s |"
    )


def test_a_row_that_was_not_measured_has_a_reason():
    line = table([Result(THROUGHPUT, note="skipped: peer is not installed")]).splitlines()[-1]
    assert line == "| throughput / the floor | >= 0.95 | skipped: peer is not installed |  |  |"


def test_the_last_outcome_is_found_among_other_output_and_behind_a_ranks_name():
    output = (
        'a warning {"x": 1}\n{"first_step_at": 1}\n[rank 0] {"first_step_at": 107.5, "samples_per_second": 9}\nend\n'
    )
    assert outcome_of(output, started=100.0) == {"first_step_seconds": 7.5, "samples_per_second": 9}


def test_the_first_step_counts_from_the_beginning_that_a_command_names():
    output = '{"first_step_at": 107.5, "counted_from": 105.0}\n'
    assert outcome_of(output, started=100.0) == {"first_step_seconds": 2.5}


def test_time_to_loss_is_when_each_side_first_reaches_the_best_loss_of_theirs():
    ours, theirs = {"curve": [(5, 3.0), (10, 2.4), (15, 2.1)]}, {"curve": [(30, 2.9), (60, 2.5), (90, 2.6)]}
    assert [side["seconds_to_loss"] for side in timed_to_loss(ours, theirs)] == [10, 60]
    assert [side["seconds_to_loss"] for side in timed_to_loss(theirs, ours)] == [float("inf"), 15]
    assert timed_to_loss({"x": 1}, theirs) == ({"x": 1}, theirs)


def test_output_without_an_outcome_is_an_error():
    with pytest.raises(MeasurementError, match="no outcome"):
        outcome_of("trained\n", 0.0)


def test_a_failed_command_is_an_error_with_its_exit_code_and_output():
    failing = Variant("failing", (sys.executable, "-c", "import sys; print('why'); sys.exit(3)"), 1)
    with pytest.raises(MeasurementError, match=r"failing ended with exit code 3\nwhy"):
        run(failing, {})


def test_rows_of_the_same_pair_share_its_runs_and_the_sides_take_turns(tmp_path):
    log = tmp_path / "log"
    code = """open({!r}, "a").write({!r}); print('{{"first_step_at": 0, "samples_per_second": {}}}')"""
    ours, theirs = (
        Variant(name, (sys.executable, "-c", code.format(str(log), name, speed)), 1)
        for name, speed in (("A", 6), ("B", 3))
    )
    rows = [Row(title, "samples_per_second", ours, theirs, "") for title in ("first", "second")]
    results = compare(rows, 2, {}, lambda text: None)
    assert log.read_text() == "ABAB"
    assert [ratios(result) for result in results] == [[2.0, 2.0], [2.0, 2.0]]


def test_a_failing_pair_does_not_stop_the_others():
    good = printing(json.dumps({"first_step_at": 0, "samples_per_second": 5}))
    absent = printing("", "absent", needs="no_such_module")
    silent = printing("nothing", "silent")
    rows = [Row(other.name, "samples_per_second", good, other, "") for other in (absent, silent, good)]
    skipped, failed, measured = compare(rows, 1, {}, lambda text: None)
    assert skipped.note == "skipped: no_such_module is not installed"
    assert failed.note.startswith("failed: ")
    assert (measured.note, ratios(measured)) == ("", [1.0])


def test_a_round_that_fails_after_a_good_one_is_left_out_and_counted(tmp_path):
    once = (
        "import os, sys; seen = os.path.exists({0!r}); open({0!r}, 'w'); "
        'print(\'{{"first_step_at": 0, "samples_per_second": 5}}\'); sys.exit(seen)'
    ).format(str(tmp_path / "seen"))
    good = printing(json.dumps({"first_step_at": 0, "samples_per_second": 5}))
    dying = Variant("dying", (sys.executable, "-c", once), 1)
    (result,) = compare([Row("dying", "samples_per_second", good, dying, "")], 2, {}, lambda text: None)
    assert (ratios(result), result.num_failed, result.note) == ([1.0], 1, "")
    assert "(1.00 to 1.00; 1 rounds failed)" in table([result])


def test_the_soak_tells_the_faults_made_of_those_wanted_while_nodes_come_back(monkeypatch):
    nodes = object.__new__(Nodes)
    nodes.workers = {"node-0": SimpleNamespace(pid=0), "node-1": SimpleNamespace(pid=1)}

    def find_children(pid, recursive):
        nodes.workers[f"node-{len(nodes.workers)}"] = SimpleNamespace(pid=2)  # as a timer's thread does
        return [SimpleNamespace(kill=lambda: None)]

    monkeypatch.setattr(soak, "_children", find_children)
    monkeypatch.setattr(soak, "_is_rank", lambda process: True)
    faults = Faults(nodes, 978, 8, 0.0, 0.0)
    assert faults._kill_a_rank()
    assert faults.describe() == "1 of 8: 1 x rank killed, 0 x node evicted, 0 x node drained"


def test_rows_are_shown_as_they_are_measured(capsys):
    assert show_rows("| a |\n|---|\n| 1 |", 0) == 3
    assert show_rows("| a |\n|---|\n| 1 |\n| 2 |", 3) == 4
    assert capsys.readouterr().out == "| a |\n|---|\n| 1 |\n| 2 |\n"


def test_each_row_of_the_recoveries_has_a_place_of_its_own_in_the_store(tmp_path, monkeypatch):
    suite = object.__new__(Suite)
    suite.directory, suite.data, suite.store = tmp_path, tmp_path, None
    urls = []

    def run(kind, task, on_one_node):
        urls.append(task.store)
        raise RuntimeError

    monkeypatch.setattr(recovery, "running", run)
    names = [name for name, fault in FAULTS.items() if fault.needs_store]
    for name in names:
        suite.try_run(Ours, name, FAULTS[name])
    assert len(set(urls)) == len(names) > 1


def test_the_soak_counts_samples_that_were_lost_or_trained_twice():
    seen = torch.full((NUM_SAMPLES,), 60 * LEARNING_RATE / BATCH_SIZE)
    assert lost_and_doubled(seen, epochs=60) == (0, 0)
    seen[3] -= 2 * LEARNING_RATE / BATCH_SIZE
    seen[7:12] += LEARNING_RATE / BATCH_SIZE
    assert lost_and_doubled(seen, epochs=60) == (2, 5)


def test_each_sample_of_the_soak_counts_itself(tmp_path):
    (tmp_path / "data").mkdir()
    prepare_data(Counting(), "", tmp_path / "data")
    run = new_run(tmp_path, "benchmarks.counting.Counting").train(2, epochs=2)
    assert lost_and_doubled(run.state()["seen"], epochs=2) == (0, 0)
    assert lost_and_doubled(run.state()["seen"], epochs=1) == (0, NUM_SAMPLES)


def test_each_sample_of_the_soak_of_a_function_counts_itself(tmp_path):
    (tmp_path / "run").mkdir()
    state = driver.run(_job("pytorch", 2, tmp_path / "run", 0.0), LocalPlace(2))
    assert state.finished is not None
    assert state.finished.step == 2 * NUM_SAMPLES // BATCH_SIZE
    seen = torch.load(tmp_path / "run/model_state.pt", weights_only=True)["seen"]
    assert lost_and_doubled(seen, epochs=2) == (0, 0)


def test_as_many_epochs_are_trained_as_fit_into_the_time_with_a_margin():
    assert num_epochs_within(600, epoch_seconds=38, start_seconds=4) == 14
    assert num_epochs_within(600, epoch_seconds=37.7, start_seconds=4) == 15
    assert num_epochs_within(10, epoch_seconds=60, start_seconds=4) == 1


@pytest.mark.slow
def test_the_quality_of_a_language_model_within_a_time_is_printed(capsys):
    quality(2, 0.25, recipe_options={"layers": 1, "width": 16, "heads": 2, "context": 512})
    first, *epochs, last = capsys.readouterr().out.splitlines()
    num_epochs = int(re.fullmatch(r"an epoch takes [\d.]+ s: (\d+) epochs", first)[1])
    assert len(epochs) == num_epochs
    figure = re.match(rf"([\d.]+) held-out nats per byte after [\d.]+ minutes.*; {num_epochs} epochs, 2 ranks", last)[1]
    assert epochs[-1].endswith(f": {figure}")
    assert 1 < float(figure) < 4


def logged(*steps):
    return [Step(at, number, 2) for at, number in steps]


def test_recovery_lasts_from_the_fault_to_the_end_of_the_longest_pause_after_it():
    steps = logged((1, 1), (2, 2), (3, 3), (9, 2), (10, 3), (13, 4))
    assert longest_pause(steps, begin=2.5) == 6.5
    assert longest_pause(steps, begin=9.5) == 3.5  # not the pause before the fault
    assert longest_pause(steps, begin=2.5, end=2.9) == 0.5  # a pause that began later belongs to another fault
    assert longest_pause(steps, begin=2.5, ranks_die=False) == 6  # the run went on at first
    assert longest_pause(steps, begin=4, ranks_die=False) == 5
    assert longest_pause(steps, begin=13.5) is None


def test_the_recovery_from_an_eviction_ends_with_its_first_step_though_a_growth_may_pause_for_longer():
    steps = [*logged((1, 1), (2, 2), (2.2, 3)), Step(8, 2, 1), Step(9, 3, 1), *logged((20, 4))]
    assert seconds_to_next_step(steps, Moment(begin=2.1, ended=2.3)) == pytest.approx(5.9)
    assert seconds_to_next_step(steps, Moment(begin=2.1)) == pytest.approx(17.9)
    assert seconds_to_next_step(steps, Moment(begin=8.5, world_size=2)) == 11.5
    assert seconds_to_next_step(steps, Moment(begin=20, ended=21)) is None


class TwoNodes(System):
    """Two nodes whose run has ended."""

    def __init__(self, directory):
        self.task, self.nodes = Task(directory, directory, 1), [None, None]

    def drain_node(self, node):
        self.nodes.remove(node)

    def add_node(self):
        self.nodes.append(None)

    def exit_code(self):
        return 0


def test_the_recovery_from_a_drain_is_the_longest_time_without_a_step_of_whichever_node(tmp_path):
    (moment,) = drain_all(TwoNodes(tmp_path), store=None)
    after = [0.1, 10.1, 10.2, 31.2, 31.3]  # the first node trains on until its notice is over, the second for longer
    assert seconds_to_next_step(logged(*((moment.begin + at, 1) for at in after)), moment) == pytest.approx(21)


def test_steps_that_are_done_again_are_counted_for_the_fault_that_caused_them():
    steps = logged((1, 1), (2, 2), (3, 3), (9, 2), (10, 3), (11, 4), (20, 4), (21, 5))
    assert num_redone(steps) == 3
    assert num_redone(steps, begin=3.5, end=12) == 2
    assert num_redone(steps, begin=12) == 1


def test_a_damaged_file_keeps_its_size_and_its_ends(tmp_path):
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(b"abc" * 100)
    damage(file)
    contents = file.read_bytes()
    assert (len(contents), contents[:100], contents[200:]) == (300, (b"abc" * 100)[:100], (b"abc" * 100)[200:])
    assert contents[100:200] == bytes(100)


def test_the_table_of_recoveries_has_a_line_for_each_fault_and_a_column_for_each_system():
    ours = {"rank killed": Outcome(2.54, 7, True), "store away": Outcome(0.1, 0, True)}
    theirs = {"rank killed": Outcome(None, 0, None), "store away": Outcome(None, 0, None, "- (it has no store)")}
    assert recovery_table({"ours": ours, "theirs": theirs}).splitlines() == [
        "| fault | ours | theirs |",
        "|---|---|---|",
        "| rank killed | 2.5 s, 7 steps again, weights equal | **the run failed** |",
        "| store away | 0.1 s, 0 steps again, weights equal | - (it has no store) |",
    ]
    assert "weights differ" in recovery_table({"ours": {"rank killed": Outcome(2.5, 7, False)}})


@pytest.mark.slow
def test_the_recovery_suite_kills_a_rank_of_ours_and_finds_the_weights_equal():
    command = (sys.executable, "-m", "benchmarks.recovery", "--systems", "ours", "--only", "kill")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| rank killed")]
    assert line.endswith("weights equal |")
    seconds, redone = line.split("|")[2].split(",")[:2]
    assert 0 < float(seconds.split()[0]) < 120
    assert int(redone.split()[0]) <= 1  # a rank that is left has the state


@pytest.mark.slow
def test_a_small_gang_without_ranks_is_measured_and_restarts_without_its_last_node():
    command = (sys.executable, "-m", "benchmarks.many_nodes", "--nodes", "3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| 3 |")]
    rate = float(line.split("|")[4].split()[0])
    assert 3 <= rate <= 8  # a heartbeat of each node, and the steps of the first
