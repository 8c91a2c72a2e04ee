"""What each command says to a usual mistake: one line that names it, and an exit status."""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flyte_ddp.__main__ import main
from flyte_ddp.events import EpochFinished, history
from flyte_ddp.promotion.champion import LAST_CHALLENGE, LAST_RUN, ChampionStore
from flyte_ddp.rehearsal.replay import find_bad_step
from tests.promotion.test_champion import manifest, state_file

REPOSITORY = Path(__file__).parents[2]


def promote(store, **changes):
    return store.promote(state_file(0), manifest(**changes), store.pointer())


def call(capsys, *arguments):
    """Return the exit status and the lines of both outputs of a command in this process."""
    status = main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err.splitlines()


def refuse(capsys, *arguments, status=2):
    """Return the one line with which a command is refused."""
    ended, out, lines = call(capsys, *arguments)
    assert (ended, out, len(lines)) == (status, [], 1), (out, lines)
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def recorded(tmp_path):
    """A history with one epoch."""
    file = tmp_path / "history.jsonl"
    epoch = EpochFinished(1, 10, 1.0, 0.5, 0.1, 2.0, 100.0, 0.5)
    file.write_text(history.to_line(epoch))
    return file


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("HERE/no.jsonl", "HERE/a.svg"), "history: expected the history.jsonl of a run, got"),
        (("HERE", "HERE/a.svg"), "history: expected the history.jsonl of a run, got"),
        (("HERE/text", "HERE/a.svg"), "line 1: expected an event of a run, got 'not a history'"),
        (("HERE/object", "HERE/a.svg"), "line 1: expected an event of a run, got '{}'"),
        (("HERE/bytes", "HERE/a.svg"), "expected an event of a run"),
        (("HERE/empty", "HERE/a.svg"), "expected a history with something to draw, got"),
        (("HERE/history.jsonl", "HERE/a.jpeg2"), "picture: expected a name that ends in .pdf"),
        (("HERE/history.jsonl", "HERE/a"), "picture: expected a name that ends in .pdf"),
        (("HERE/history.jsonl", "HERE/no/a.svg"), "picture: expected a file that can be written"),
        (("HERE/history.jsonl", "HERE/a.svg", "los"), "(did you mean loss?)"),
        (("HERE/history.jsonl", "HERE/a.svg", "x"), "name: expected some of loss, "),
    ],
)
def test_a_plot_names_what_is_wrong_with_its_files_or_panels(
    tmp_path, capsys, recorded, arguments, expected
):
    (tmp_path / "text").write_text("not a history\n")
    (tmp_path / "object").write_text("{}\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\n")
    (tmp_path / "empty").touch()
    given = [each.replace("HERE", str(tmp_path)) for each in arguments]
    assert expected in refuse(capsys, "plot", *given)
    assert not list(tmp_path.glob("a*"))


def test_a_plot_is_drawn_of_some_panels(tmp_path, capsys, recorded):
    picture = tmp_path / "a.svg"
    assert call(capsys, "plot", recorded, picture, "loss")[:2] == (0, [f"picture: {picture}"])
    assert picture.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"{}",
        b'{"ended_at": 3}',
        b'{"ended_at": "yesterday"}',
        b'{"ended_at": null, "outcome": "promoted"}',
        b"\xff",
    ],
)
def test_a_damaged_record_of_the_last_retraining_is_named(tmp_path, capsys, contents):
    (tmp_path / LAST_RUN).write_bytes(contents)
    line = refuse(capsys, "promotion", "status", tmp_path, "--max-age", "26h", status=1)
    assert f"{LAST_RUN} is damaged: " in line


def test_a_record_without_a_time_zone_is_of_utc(tmp_path, capsys):
    promote(ChampionStore(str(tmp_path)))
    record = {"ended_at": "2026-01-02T03:04:05", "outcome": "promoted", "execution": ""}
    (tmp_path / LAST_RUN).write_text(json.dumps(record))
    line = refuse(capsys, "promotion", "status", tmp_path, "--max-age", "26h", status=1)
    assert "expected one within 26h" in line


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"created_at": 5},
        {"metrics": []},
        {"metrics": {"accuracy": "high"}},
        {"class_names": 3},
        {"num_train_samples": "many"},
    ],
)
def test_a_manifest_with_values_of_other_types_is_damaged(tmp_path, capsys, change):
    store = ChampionStore(str(tmp_path))
    made = promote(store)
    store.record(LAST_RUN, "promoted", "")
    file = tmp_path / "versions" / made.version / "manifest.json"
    contents = json.dumps({**json.loads(file.read_bytes()), **change}).encode()
    file.write_bytes(contents)
    pointer = json.loads((tmp_path / "champion.json").read_bytes())
    pointer["manifest_sha256"] = hashlib.sha256(contents).hexdigest()
    (tmp_path / "champion.json").write_text(json.dumps(pointer))
    for command in (("show", tmp_path), ("status", tmp_path, "--max-age", "26h")):
        line = refuse(capsys, "promotion", *command, status=1)
        assert f"manifest is damaged, or of another version: {next(iter(change))}" in line
    # The list works in spite of the damage.
    assert call(capsys, "promotion", "list", tmp_path)[0] == 0


@pytest.mark.parametrize(
    "pointer", [b"[]", b"{", b'{"version": 3, "manifest_sha256": "", "parent": ""}', b"7"]
)
def test_a_damaged_pointer_is_named(tmp_path, capsys, pointer):
    store = ChampionStore(str(tmp_path))
    promote(store)
    store.record(LAST_RUN, "promoted", "")
    (tmp_path / "champion.json").write_bytes(pointer)
    line = refuse(capsys, "promotion", "status", tmp_path, "--max-age", "26h", status=1)
    assert "champion.json is damaged: " in line


def test_records_of_the_champion_are_json_also_with_nan(tmp_path, capsys):
    """JSON has no NaN: they are null, and of a manifest NaN again when it is read."""
    store = ChampionStore(str(tmp_path))
    made = promote(store, metrics={"accuracy": math.nan, "loss": math.inf, "f1": 0.5})
    store.record(LAST_CHALLENGE, "kept", "", advantage=[math.nan], had_champion=True)
    files = [
        *(tmp_path / LAST_CHALLENGE, tmp_path / "versions" / made.version / "manifest.json"),
        tmp_path / "champion.json",
    ]
    for file in files:
        json.loads(file.read_bytes(), parse_constant=pytest.fail)
    read = store.manifest()
    assert math.isnan(read.metrics["accuracy"])
    assert read.metrics["f1"] == 0.5
    _, lines, _ = call(capsys, "promotion", "show", tmp_path)
    shown = json.loads("\n".join(lines), parse_constant=pytest.fail)
    assert shown["champion"]["metrics"] == {"accuracy": None, "loss": None, "f1": 0.5}


def test_a_manifest_of_the_version_before_with_nan_is_read(tmp_path):
    store = ChampionStore(str(tmp_path))
    made = promote(store)
    file = tmp_path / "versions" / made.version / "manifest.json"
    text = re.sub(r'"metrics": \{[^}]*\}', '"metrics": {"accuracy": NaN}', file.read_text())
    file.write_text(text)
    pointer = json.loads((tmp_path / "champion.json").read_bytes())
    pointer["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "champion.json").write_text(json.dumps(pointer))
    assert math.isnan(store.manifest().metrics["accuracy"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--namespace", each) for each in ("", "a b", "A", "a_b", "-a", "a/b", "x" * 64, "a\nb")),
        *(("--image", each) for each in ("a b", "a\nb", '"a"', "-", "a: b", "a\n- b")),
    ],
)
def test_deploy_takes_names_of_namespaces_and_images_alone(capsys, option, value):
    given = {"--namespace": "team", "--image": "host/image:1", option: value}
    line = refuse(capsys, "deploy", *(f"{name}={each}" for name, each in given.items()))
    assert f"{option}: expected " in line


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "-inf"])
def test_an_estimate_compares_with_a_finite_memory(capsys, value):
    line = refuse(capsys, "estimate", "--recipe", "digits", f"--gpu-memory={value}")
    assert "--gpu-memory: expected a finite number of at least 0" in line


def test_the_version_is_printed(capsys):
    for name in ("--version", "-V"):
        status, lines, _ = call(capsys, name)
        assert (status, len(lines)) == (0, 1)
        assert re.fullmatch(r"flyte-ddp \d+\.\d+\.\d+\S*, \S+", lines[0])


@pytest.mark.parametrize("command", [("fields",), ("--version",), ("--help",)])
def test_an_output_that_is_full_is_one_line(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flyte_ddp", *command],
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output: No space left on device\n",
    )


def test_an_output_without_a_reader_ends_the_command_without_a_word():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m flyte_ddp fields | true; echo ${{PIPESTATUS[0]}}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""


RECIPE = """
from flyte_ddp import Recipe
class Flowers(Recipe):
    pass
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with modules of recipes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "growing").mkdir()
    (tmp_path / "growing/__init__.py").touch()
    (tmp_path / "growing/flowers.py").write_text(RECIPE)
    (tmp_path / "growing/two.py").write_text(RECIPE + RECIPE.replace("Flowers", "Trees"))
    (tmp_path / "growing/none.py").write_text("import flyte_ddp\nfrom flyte_ddp import Recipe\n")
    (tmp_path / "lonely_flowers.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [each for each in sys.modules if each.startswith(("growing", "lonely_"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("growing/flowers.py", "growing.flowers.Flowers"),
        ("./growing/flowers.py", "growing.flowers.Flowers"),
        ("HERE/growing/flowers.py", "growing.flowers.Flowers"),
        ("growing.flowers", "growing.flowers.Flowers"),
        ("growing/flowers", "growing.flowers.Flowers"),
        ("growing/two.py", "growing.two.Flowers or growing.two.Trees"),
        ("growing.two", "growing.two.Flowers or growing.two.Trees"),
        ("lonely_flowers.py", "lonely_flowers.Flowers"),
        ("lonely_flowers", "lonely_flowers.Flowers"),
        ("growing/none.py", ""),
        ("growing.none", ""),
        ("growing/missing.py", ""),
        ("/no/such/place.py", ""),
        ("..", ""),
        ("", ""),
    ],
)
def test_a_file_or_module_in_place_of_a_recipe_is_answered_with_its_recipe(
    project, capsys, name, meant
):
    line = refuse(capsys, "train", name.replace("HERE", str(project)))
    assert "recipe: expected " in line
    assert line.count("did you mean") == bool(meant)
    assert not meant or f"(did you mean {meant}?)" in line


def test_a_rehearsal_of_a_function_refuses_what_follows_it(capsys):
    line = refuse(capsys, "rehearse", "tests.support.functions:main", "--minutes", "5")
    assert "'--minutes 5'" in line
    assert "before MODULE:FUNCTION" in line


def test_predictions_of_a_generator_name_what_generates(tmp_path, capsys):
    torch.save({}, tmp_path / "model_state.pt")
    for recipe, workflow in (("pet_names", "pet_names"), ("text", "text")):
        line = refuse(
            capsys,
            *("predict", recipe, "--model-state", tmp_path / "model_state.pt"),
            *("--output", tmp_path / "out", "--data", tmp_path),
        )
        assert f"workflows/{workflow}.py" in line


def test_a_replay_without_a_step_takes_the_newest_bad_one(tmp_path, capsys):
    line = refuse(capsys, "replay", tmp_path / "nowhere")
    assert "--step: expected a step's number, from 1, because no bad step was kept in" in line
    for name in ("bad-step-0000000005-00000.pt", "bad-step-0000000012-00000.pt"):
        (tmp_path / name).touch()
    assert find_bad_step(str(tmp_path)) == 12
    assert "--step: expected a whole number of at least 1, got -3" in refuse(
        capsys, "replay", tmp_path, "--step=-3"
    )
