"""A reader finds the old champion or the new one, whole, whatever happens to the process that
promotes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import uuid
from pathlib import Path

import pytest
import torch
import yaml

from flyte_ddp import __main__ as command_line
from flyte_ddp import load_champion
from flyte_ddp.errors import (
    ChampionChanged,
    ChampionError,
    ConfigError,
    NoChampion,
    StorageDenied,
)
from flyte_ddp.promotion.champion import ChampionStore, Manifest
from flyte_ddp.storage import Storage
from tests.support.emulators import KINDS, abfs, gs, place_url, s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.runs import flip, to_safetensors


def main(arguments):
    return command_line.main(["promotion", *arguments])


def state_file(number):
    buffer = io.BytesIO()
    torch.save({"weight": torch.full((1000,), float(number))}, buffer)
    return buffer.getvalue()


def manifest(number=0, **changes):
    values = {
        **dict.fromkeys(("version", "parent", "created_at"), ""),
        "recipe": "digits",
        "recipe_version": "r1",
        "config": {"epochs": 3, "sizes": [1, 2]},
        "data": "drawn digits",
        "data_fingerprint": "f1",
        "num_train_samples": 100,
        "num_test_samples": 10,
        "metrics": {"test_loss": float(number)},
        "parent_metrics": {},
        "kickoff_time": "2026-01-02T03:04:05Z",
        "code_version": "c1",
        "execution": "e1",
    }
    return Manifest(**{**values, **changes})


@pytest.fixture
def store(url):
    return ChampionStore(url)


@pytest.fixture
def local_store(tmp_path):
    return ChampionStore(str(tmp_path))


def promote(store, number):
    return store.promote(state_file(number), manifest(number), store.pointer())


def number_in(loaded):
    """The number that was promoted, where state and manifest are of the same version."""
    state, loaded_manifest = loaded
    numbers = {*state["weight"].tolist(), loaded_manifest.metrics["test_loss"]}
    assert len(numbers) == 1
    return numbers.pop()


def file_of(store, name):
    """A local file of the version in use, or of the store itself."""
    versions = Path(store.url, "versions", store.in_use().version)
    return versions / name if (versions / name).exists() else Path(store.url, name)


# Promotion


def test_a_champion_may_be_safetensors(url):
    contents = to_safetensors({"x": torch.ones(2)})
    promoted = ChampionStore(url).promote(contents, manifest(), b"")
    state, read = load_champion(url)
    assert (promoted.file, read) == ("model_state.safetensors", promoted)
    assert torch.equal(state["x"], torch.ones(2))


@pytest.mark.parametrize("cut", ["model_state.pt", "manifest.json", "champion.json"])
def test_an_interrupted_promotion_changes_nothing(url, cut, monkeypatch, store):
    first = promote(store, 1).version

    def end(function):
        def call(storage, name, *contents):
            if name.endswith(cut):
                raise SystemExit
            function(storage, name, *contents)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", end(Storage.write))
        patch.setattr(Storage, "replace", end(Storage.replace))
        with pytest.raises(SystemExit):
            promote(store, 2)

    assert number_in(load_champion(url)) == 1
    assert promote(store, 3).parent == first


# Two promoters at once


def test_the_second_of_two_promotions_over_one_champion_fails_and_leaves_nothing(url, store):
    promote(store, 1)
    pointer = store.pointer()
    store.promote(state_file(2), manifest(2), pointer)
    with pytest.raises(ChampionChanged, match="another version was put in use meanwhile"):
        store.promote(state_file(3), manifest(3), pointer)

    assert number_in(load_champion(url)) == 2
    assert number_in(store.load(pointer)) == 1  # this reader has looked before
    assert sorted(each.metrics["test_loss"] for each in store.versions()) == [1, 2]
    names = {name.rpartition("/")[2] for name in Storage(f"{store.url}/versions").find()}
    assert names == {"manifest.json", "model_state.pt"}


@pytest.mark.parametrize("url", ["s3", *KINDS], indirect=True)
@pytest.mark.parametrize("has_champion", [False, True])
def test_stores_refuse_a_put_after_another_promotion(url, monkeypatch, has_champion, store):
    if has_champion:
        promote(store, 1)
    pointer, look = store.pointer(), Storage.read

    def look_and_be_late(*arguments):
        monkeypatch.setattr(Storage, "read", look)
        try:
            return look(*arguments)
        finally:
            promote(ChampionStore(url), 2)

    monkeypatch.setattr(Storage, "read", look_and_be_late)
    with pytest.raises(ChampionChanged):
        store.promote(state_file(3), manifest(3), pointer)
    assert number_in(load_champion(url)) == 2


def s3_error(code, status):
    from botocore.exceptions import ClientError

    error = OSError(code)
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = ClientError(answer, "PutObject")
    return error


def is_conditional(options):
    return bool({"IfMatch", "IfNoneMatch"} & options.keys())


def test_a_put_repeated_after_a_lost_answer_succeeds(bucket, monkeypatch):
    store = ChampionStore(f"{bucket}/{uuid.uuid4().hex}")
    promote(store, 1)
    put = store.storage.file_system.pipe_file

    def put_and_lose_the_answer(path, contents, **options):
        put(path, contents, **options)
        if is_conditional(options):
            raise s3_error("PreconditionFailed", 412)

    monkeypatch.setattr(store.storage.file_system, "pipe_file", put_and_lose_the_answer)
    promote(store, 2)
    assert number_in(load_champion(store.url)) == 2


@pytest.mark.parametrize(("code", "is_done"), [("NotImplemented", True), ("AccessDenied", False)])
def test_conditional_puts_are_skipped_only_where_unsupported(bucket, monkeypatch, code, is_done):
    store = ChampionStore(f"{bucket}/{uuid.uuid4().hex}")
    put = store.storage.file_system.pipe_file

    def refuse_conditions(path, contents, **options):
        if is_conditional(options):
            raise s3_error(code, 501 if is_done else 403)
        put(path, contents, **options)

    monkeypatch.setattr(store.storage.file_system, "pipe_file", refuse_conditions)
    if is_done:
        promote(store, 1)
    else:
        with pytest.raises(StorageDenied, match=code):
            promote(store, 1)
    assert bool(store.pointer()) == is_done


# Damage


def cut(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("model_state.pt", cut, "model_state.pt is damaged"),
        ("model_state.pt", flip, "model_state.pt is damaged"),
        ("model_state.pt", os.unlink, "model_state.pt is missing"),
        ("manifest.json", flip, "manifest.json is damaged"),
        ("manifest.json", os.unlink, "manifest.json is missing"),
        ("champion.json", cut, "champion.json is damaged"),
        (
            "champion.json",
            lambda file: file.write_text("[]"),
            "champion.json is damaged",
        ),
    ],
)
def test_a_damaged_champion_is_named_and_not_loaded(tmp_path, name, damage, expected, local_store):
    promote(local_store, 1)
    damage(file_of(local_store, name))
    with pytest.raises(ChampionError, match=expected):
        load_champion(str(tmp_path))
    promote(local_store, 2)  # damage does not prevent a promotion
    assert number_in(load_champion(str(tmp_path))) == 2


class Harm:
    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


def test_a_state_that_is_more_than_tensors_is_not_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    store = ChampionStore(str(tmp_path / "champion"))
    store.promote(pickle.dumps(Harm(), protocol=2), manifest(), b"")
    with pytest.raises(ChampionError, match="not a state dict of tensors"):
        load_champion(store.url)
    assert not (tmp_path / "harm").exists()


# Rollback


def test_a_rollback_switches_to_the_parent_and_back(url, store):
    first, second, third = (promote(store, number).version for number in (1, 2, 3))

    for version, number, wanted in ((second, 2, ""), (first, 1, ""), (third, 3, third)):
        assert store.rollback(wanted).version == version
        assert number_in(load_champion(url)) == number


@pytest.mark.parametrize("to", ["parent", "in use"])
def test_a_promotion_that_was_compared_before_a_rollback_fails(to, store):
    versions = [promote(store, number).version for number in (1, 2)]
    compared_with = store.pointer()
    assert not store.in_use(compared_with).held_since
    kept = store.rollback("" if to == "parent" else versions[1]).version
    assert kept == versions[to == "in use"]
    with pytest.raises(ChampionChanged):
        store.promote(state_file(3), manifest(3), compared_with)
    assert (store.in_use().version, bool(store.in_use().held_since)) == (kept, True)


@pytest.fixture
def late(url, monkeypatch):
    """A store with two versions. Before its next change of the pointer, another process rolls back
    to the first one.
    """
    store, replace = ChampionStore(url), Storage.replace
    first, second = (promote(store, number).version for number in (1, 2))

    def be_late(*arguments):
        monkeypatch.setattr(Storage, "replace", replace)
        ChampionStore(url).rollback(first)
        return replace(*arguments)

    return store, first, second, lambda: monkeypatch.setattr(Storage, "replace", be_late)


@pytest.mark.parametrize("wanted", [1, 2])
def test_two_rollbacks_at_once_leave_one_version_and_the_hold(late, wanted):
    store, first, *_ = late
    late[3]()
    # The same version in the same second leaves nothing to refuse.
    with contextlib.suppress(ChampionChanged):
        store.rollback(late[wanted])
    assert (store.in_use().version, bool(store.in_use().held_since)) == (first, True)
    assert store.release()
    assert (store.in_use().version, store.in_use().held_since, store.release()) == (
        first,
        "",
        False,
    )
    assert promote(store, 3).version == store.in_use().version


def test_a_release_while_another_version_is_put_in_use_leaves_the_hold_of_that_one(late):
    store, first, second, be_late = late
    store.rollback(second)
    be_late()
    with pytest.raises(ChampionChanged):
        store.release()
    assert (store.in_use().version, bool(store.in_use().held_since)) == (first, True)


def test_a_rollback_needs_the_files_of_the_version_it_puts_in_use_alone(tmp_path, local_store):
    with pytest.raises(NoChampion):
        local_store.rollback()
    first = promote(local_store, 1).version
    with pytest.raises(
        ConfigError,
        match=f"expected one of {first} in .*, got none, and the one in use has no parent",
    ):
        local_store.rollback()
    with pytest.raises(ConfigError, match=f"version: expected one of {first} in .*, got '../x'$"):
        local_store.rollback("../x")
    promote(local_store, 2)
    for name in ("model_state.pt", "manifest.json"):
        file_of(local_store, name).unlink()
    local_store.rollback()
    assert number_in(load_champion(str(tmp_path))) == 1
    file = file_of(local_store, "model_state.pt")
    promote(local_store, 2)
    flip(file)
    with pytest.raises(ChampionError):
        local_store.rollback()
    assert number_in(load_champion(str(tmp_path))) == 2


@pytest.mark.parametrize(
    ("spoil", "arguments", "expected"),
    [
        (
            lambda store: None,
            ["--max-age", "26"],
            "--max-age: expected a number with s, m, h or d, such as 90m, got '26'",
        ),
        (lambda store: store.storage.delete("last_run.json"), [], "no retraining has ended yet"),
        (
            lambda store: store.storage.write("last_run.json", b"{"),
            [],
            "last_run.json is damaged: ",
        ),
        (
            lambda store: store.record("last_run.json", "refused", ""),
            [],
            "until data, recipe or config",
        ),
        (
            lambda store: store.storage.write(
                "last_run.json", b'{"outcome": "unchanged", "ended_at": "2999-01-02T03:04:05Z"}'
            ),
            [],
            "expected a time in the past: correct the clock",
        ),
        (lambda store: store.storage.write("champion.json", b"{"), [], "champion.json is damaged"),
        (
            lambda store: store.storage.delete(f"versions/{store.in_use().version}/manifest.json"),
            [],
            "is missing",
        ),
    ],
)
def test_status_reports_a_retraining_that_needs_attention(
    capsys, spoil, arguments, expected, local_store
):
    promote(local_store, 1)
    local_store.record("last_run.json", "promoted", "f1")
    local_store.record("last_run.json", "unchanged", "f2")
    assert main(["status", local_store.url, "--max-age", "1m"]) == 0
    assert "the last retraining ended 0.0 h ago" in (line := capsys.readouterr().out)
    assert "f2): unchanged; the last promotion was 20" in line
    spoil(local_store)
    code = main(["status", local_store.url, *(arguments or ["--max-age", "26h"])])
    assert code == (2 if arguments else 1)
    assert expected in capsys.readouterr().err


def test_other_files_beside_the_versions_stop_nothing(capsys, local_store, tmp_path):
    for number in (1, 2, 3):
        promote(local_store, number)
    stray = tmp_path / "versions/.DS_Store"
    stray.touch()
    (tmp_path / "versions/notes").mkdir()
    (tmp_path / "versions/notes/mine.txt").touch()
    assert len(local_store.versions()) == 3
    assert main(["list", local_store.url]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["prune", local_store.url, "--keep", "1"]) == 0
    assert "1 versions deleted" in capsys.readouterr().out
    assert stray.exists()
    assert (tmp_path / "versions/notes/mine.txt").exists()


def test_the_monitor_in_deploy_uses_valid_arguments(capsys, local_store):
    promote(local_store, 1)
    local_store.record("last_run.json", "promoted", "f1")
    deploy = Path(__file__).parents[2] / "deploy"
    cron_job = yaml.safe_load((deploy / "champion-status.yaml").read_text())
    pod = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    python, _, package, *arguments = (
        word.replace("CHAMPION_URL", local_store.url) for word in container["command"]
    )
    assert (python, package) == ("python", "flyte_ddp")
    assert command_line.main(arguments) == 0
    # The command reads the store with the identity of the tasks.
    assert f"name: {pod['serviceAccountName']}\n" in (deploy / "rbac.yaml").read_text()


def test_pruning_keeps_the_newest_the_current_and_its_parent(url, store):
    versions = [promote(store, number).version for number in range(6)]
    store.rollback(versions[2])
    assert store.prune(2) == [versions[0], versions[3]]
    assert [each.version for each in store.versions()] == [
        versions[1],
        versions[2],
        versions[4],
        versions[5],
    ]
    assert store._list_versions() == [each.version for each in store.versions()]
    assert number_in(load_champion(url)) == 2
    assert number_in((store.rollback(), store.load())[1]) == 1
    assert store.prune(2) == [versions[2]]


@pytest.mark.parametrize("reader", ["manifest", "load"])
def test_a_version_that_is_pruned_while_it_is_read_is_replaced_by_the_one_in_use(
    local_store, monkeypatch, reader
):
    promote(local_store, 0)
    read, versions = ChampionStore._read, []

    def prune_first(store, version, name):
        if not versions:
            versions.append(version)
            promote(local_store, 1)
            promote(local_store, 2)
            assert local_store.prune(1) == [version]
        return read(store, version, name)

    monkeypatch.setattr(ChampionStore, "_read", prune_first)
    found = getattr(local_store, reader)()
    newest = found if reader == "manifest" else found[1]
    assert newest.metrics == {"test_loss": 2.0}


def test_nothing_is_pruned_if_the_current_version_is_unknown(tmp_path, capsys, local_store):
    for number in range(3):
        promote(local_store, number)
    (tmp_path / "champion.json").write_text("{")
    for arguments, expected in (
        ([], "champion.json is damaged"),
        (["--keep", "0"], "keep: expected a whole number"),
    ):
        assert main(["prune", local_store.url, *(arguments or ["--keep", "1"])])
        assert expected in capsys.readouterr().err
    assert len(local_store.versions()) == 3


def test_a_list_says_that_there_is_no_champion_or_a_damaged_one(tmp_path, capsys, local_store):
    assert main(["list", local_store.url])
    assert "has no champion yet" in capsys.readouterr().err
    first, _ = promote(local_store, 1), promote(local_store, 2)
    (tmp_path / "champion.json").write_text("{")
    assert main(["release", local_store.url])
    assert "champion.json is damaged" in capsys.readouterr().err
    # A rollback to an existing version is still possible then, so the list has to work.
    assert main(["list", local_store.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"  {first.version}")
    assert "champion.json is damaged" in lines[-1]
    assert main(["rollback", local_store.url, first.version]) == 0


def test_the_command_lists_shows_and_rolls_back(capsys, local_store):
    first, second = promote(local_store, 1), promote(local_store, 2)
    local_store.record("last_challenge.json", "not_better", "f1")

    assert main(["list", local_store.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line[0] for line in lines) == [" ", "*"]
    assert next(line for line in lines if line[0] == "*").startswith(
        f"* {second.version}  digits  test_loss 2"
    )
    main(["show", local_store.url])
    shown = json.loads(capsys.readouterr().out)
    assert shown["champion"]["version"] == second.version
    assert shown["last_challenge"]["outcome"] == "not_better"
    main(["rollback", local_store.url])
    assert capsys.readouterr().out == f"{first.version} is in use again, until `release`\n"
    local_store.record("last_run.json", "held", "")
    main(["status", local_store.url, "--max-age", "1h"])
    assert re.search(
        (
            rf"held; .*; {first.version} is in use, held by a rollback since "
            r"20.*Z\n"
        ),
        capsys.readouterr().out,
    )
    for told in ("retrainings promote again", "no rollback holds a version"):
        main(["release", local_store.url])
        assert capsys.readouterr().out == f"{told}\n"
