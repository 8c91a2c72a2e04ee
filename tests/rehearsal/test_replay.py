"""`flyte-ddp replay`: a step of a run once more, to the bit, and the state before a bad one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import ConfigError, NonFiniteLoss, RankFailure
from flyte_ddp.rehearsal.replay import main
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

REPOSITORY = Path(__file__).parents[2]
RECIPE = "tests.support.recipe_with_bad_sample.Planted"
SAVE = """
import torch
from tests.support.recipe_with_bad_sample import own_part
torch.save(list(map(own_part, (each.grad for each in model.parameters()))), {file!r})
p len(batch), [each.shape for each in losses]
continue
"""


def planted(bad, kind, mixes=False):
    return {"bad": bad, "kind": kind, "mixes": mixes}


def replay(capsys, run, step, *options):
    """Return what a replay has seen of a step."""
    capsys.readouterr()
    assert main([str(run.checkpoints), "--step", str(step), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def remove_state(run, step):
    for file in run.checkpoints.glob(f"step-{step:010d}*"):
        file.unlink()


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_the_gradient_is_the_runs_to_the_bit_also_over_an_evaluation(tmp_path, num_ranks, parallel):
    """Seen by the debugger, which stops after the backward pass."""
    run = new_run(tmp_path, "tests.support.recipe_with_bad_sample.Recorded")
    options = {**planted(0, "", mixes=True), "directory": str(tmp_path)}
    run.train(
        num_ranks,
        recipe_options=options,
        global_batch_size=6,
        checkpoints_to_keep=9,
        parallel=parallel,
        gradient_accumulation=3 - num_ranks,
    )
    expected = [torch.load(tmp_path / f"{rank}-14.pt") for rank in range(num_ranks)]
    remove_state(run, 12)  # the end of the second epoch
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flyte_ddp", "replay", str(run.checkpoints)),
            *("--step", "14", "--pdb"),
        ],
        cwd=REPOSITORY,
        input=SAVE.format(file=str(tmp_path / "replayed.pt")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "from the state after step 6; steps repeated: 7\n" in done.stderr
    assert f"({3 - num_ranks}, [torch.Size([3])" in done.stderr
    rank = int(re.search(r"key\n\d+ +(\d)", done.stdout)[1])  # rank of the worst sample
    replayed = torch.load(tmp_path / "replayed.pt")
    for own, other in zip(replayed, expected[rank], strict=True):
        assert own.equal(other)
    norms = [float(each) for each in re.findall(r"^(\S+) +\d\.\w+$", done.stdout, re.M)]
    if parallel == "ddp":
        expected_norms = [float(each.norm()) for each in expected[rank]]
        assert norms == pytest.approx(expected_norms, rel=1e-4)


@pytest.mark.long
def test_a_bad_step_is_shown_from_the_state_before_it_and_without_its_sample(tmp_path, capsys):
    run = new_run(tmp_path, RECIPE)
    with pytest.raises(RankFailure, match="the loss is nan at step 5"):
        run.train(2, recipe_options=planted(29, "pixel"), global_batch_size=6)
    (kept,) = run.checkpoints.glob("*.pt")  # The run ended in its first epoch.
    assert kept.name.startswith("bad-step-0000000005-")
    before = sorted(os.listdir(run.checkpoints))
    seen = replay(capsys, run, 5)
    worst, *others = seen["samples"]
    assert (worst["key"], worst["loss"], worst["largest_value"]) == ("file-29.png", None, None)
    assert len(others) == 5
    assert all(each["loss"] > 0 for each in others)
    assert (seen["loss"], seen["gradient_norm"], seen["weights_are_finite"]) == (None, None, True)
    first = {"name": "0", "kind": "Identity", "rank": worst["rank"], "input_is_finite": False}
    assert seen["first_not_finite"] == first
    both = replay(capsys, run, 5, "--without", "file-29.png")
    alone = replay(capsys, run, 5, "--without", "29", "--processes", "1")
    losses = {each["index"]: each["loss"] for each in others}
    for without in (both, alone):
        assert without["first_not_finite"] is None
        assert {each["index"]: each["loss"] for each in without["samples"]} == pytest.approx(losses)
        assert without["loss"] == pytest.approx(sum(losses.values()) / 5)
    assert both["gradient_norms"] == pytest.approx(alone["gradient_norms"], rel=1e-5)
    assert sorted(os.listdir(run.checkpoints)) == before
    with pytest.raises(RankFailure, match="--without: expected index or key of .*, got 'nobody'"):
        replay(capsys, run, 5, "--without", "nobody")


def test_a_step_that_was_skipped_and_one_after_it(tmp_path, capsys):
    run = new_run(tmp_path, RECIPE)
    options = {"recipe_options": planted(29, "pixel"), "on_bad_step": "skip"}
    run.train(1, global_batch_size=6, checkpoints_to_keep=9, **options)
    assert not list(run.checkpoints.glob("bad-step-*"))
    left_out = CheckpointStore(str(run.checkpoints), 1).load(18)["progress"]["left_out"]
    bad = 6 + left_out[1][1] + 1  # Sample 6 is in the second epoch.
    assert replay(capsys, run, bad)["samples"][0]["key"] == "file-29.png"
    assert replay(capsys, run, bad + 1)["loss"] > 0


def test_the_last_bad_step_leaves_one_state_which_retention_ignores(tmp_path):
    run = new_run(tmp_path, RECIPE)
    options = {"recipe_options": planted(29, "pixel", mixes=True), "global_batch_size": 6}
    store = CheckpointStore(str(run.checkpoints), 1)

    def kept():
        return [each.name for each in run.checkpoints.glob("bad-step-*")]

    with pytest.raises(NonFiniteLoss, match="at step 5"):
        new_trainer(run, epochs=1, **options).fit()
    assert kept() == ["bad-step-0000000005-00000.pt"]
    assert store.load_latest()[0] is None
    new_trainer(run, epochs=1, on_bad_step="skip", **options).fit()
    assert kept() == ["bad-step-0000000005-00000.pt"]
    last = new_trainer(run, on_bad_step="skip", max_bad_steps=1, **options)
    last.checkpoints.resume()
    with pytest.raises(NonFiniteLoss, match="max_bad_steps: 1 were met before") as error:
        last.fit()
    step = int(re.search(r"at step (\d+)", str(error.value))[1])
    assert kept() == [f"bad-step-{step:010d}-00000.pt"]
    state = store.load(step, is_bad=True)
    assert state["progress"]["step"] == step - 1
    # The averages do not contain the NaN.
    for name, value in last.state.model.state_dict().items():
        assert value.equal(state["model"][name])
        assert value.isfinite().all()


def test_bad_input_is_one_line(tmp_path, capsys):
    def refuse(place, step, line):
        with pytest.raises(ConfigError, match=line):
            main([str(place), "--step", str(step)])

    refuse(tmp_path / "none", 3, "expected a state before step 3 in .*none, got none")
    assert not (tmp_path / "none").exists()
    run = new_run(tmp_path / "run")
    trainer = new_trainer(run, epochs=1)
    trainer.checkpoints.save(best=False)
    trainer.session.saver.wait()
    refuse(run.checkpoints, 0, "--step: expected a whole number of at least 1, got 0")
    refuse(run.checkpoints, 1, "expected the run of a recipe that has a name, with this")
    trainer.checkpoints.notes.origin = {"code": {"recipe.py": "1"}}
    trainer.checkpoints.notes.data_facts = {"number of training samples": len(trainer.train)}
    trainer.checkpoints.save(best=False)
    trainer.session.saver.wait()
    num_steps = trainer.state.schedule.num_steps
    refuse(run.checkpoints, num_steps + 1, f"--step: expected at most {num_steps}, because")
    function = CheckpointStore(str(tmp_path / "function"), 1)
    position = {"epoch": 1, "num_samples": 8}
    function.save({"step": 4, "state": {}, "position": position}, 4, best=False)
    function.wait()
    refuse(tmp_path / "function", 6, "got a function's, .* after step 4 .epoch 1, num_samples 8")


@pytest.mark.long
def test_a_step_of_packed_rows_names_their_documents(tmp_path, capsys):
    run = new_run(tmp_path, "tests.support.packed_rows.Chats")
    run.train(2)
    seen = replay(capsys, run, 4)
    alone = replay(capsys, run, 4, "--processes", "1")
    assert len(seen["samples"]) == 6
    for row in seen["samples"]:
        assert re.search(r"/train/000\d\.jsonl rows \d+( from token \d+)?(, \d+.*)?$", row["key"])
    losses = {each["index"]: each["loss"] for each in seen["samples"]}
    assert {each["index"]: each["loss"] for each in alone["samples"]} == pytest.approx(losses)
    assert alone["loss"] == pytest.approx(seen["loss"])
    assert alone["gradient_norm"] == pytest.approx(seen["gradient_norm"], rel=1e-5)
