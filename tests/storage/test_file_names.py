"""Names that files contain are names below a directory, never paths to other places."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from flyte_ddp.checkpoints.files import Damaged, read_file
from flyte_ddp.data.index import read_index
from flyte_ddp.data.source import Source
from flyte_ddp.errors import ChampionError, ConfigError, DataError
from flyte_ddp.events import RunFinished
from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.storage import Storage, file_below
from flyte_ddp.task_run.files import TaskFiles

OUTSIDE = ("../victim.txt", "a/../../victim.txt", "..", "", "/etc/hostname", "a\0b", None, 3)
EXPECTED = "expected the name of a file below a directory, got "


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place" / "a").mkdir(parents=True)
    (tmp_path / "victim.txt").write_text("published")
    yield tmp_path / "place"
    assert (tmp_path / "victim.txt").read_text() == "published"


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_operation_of_a_storage_leaves_its_directory(place, name):
    storage = Storage(str(place), "place")
    operations = (
        lambda: storage.write(name, b"x"),
        lambda: storage.read(name),
        lambda: storage.delete(name),
        lambda: storage.replace(name, b"x", b""),
        lambda: storage.rename(name, "new"),
        lambda: storage.rename("a", name),
        lambda: file_below(place, name, "place"),
    )
    for operate in operations:
        with pytest.raises(ConfigError, match=f"^place: {EXPECTED}"):
            operate()
    assert [each.name for each in place.iterdir() if each.name != ".lock"] == ["a"]


def test_a_link_leads_to_no_file_outside(place):
    (place / "link").symlink_to(place.parent)
    with pytest.raises(ConfigError, match="^place: expected a file below .* got a link in"):
        file_below(place, "link/victim.txt", "place")
    assert file_below(place, "a/..b", "place") == place / "a" / "..b"


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_export_neither_deletes_nor_writes_a_file_elsewhere(place, name):
    """Neither by the card of the run before nor by the list of the run."""
    export = place / "export"
    export.mkdir()
    (export / "old.bin").touch()
    card = {"model": {"files": ["old.bin", name, "../../victim.txt"]}}
    (export / "run_card.json").write_text(json.dumps(card))
    store = place / "store"
    store.mkdir()
    (store / "model.bin").write_bytes(b"weights")
    finished = RunFinished(1, 1.0, export_url=str(store), exported=["model.bin", name])
    TaskFiles(place).collect_export(finished, {"model": {"files": []}})
    assert not (export / "old.bin").exists()
    assert (export / "model.bin").read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["../../victim", "..", "a/b", "/etc", None, 3])
@pytest.mark.parametrize("field", ["version", "parent", "file"])
def test_a_champions_files_lie_in_its_versions(place, field, name):
    store = ChampionStore(str(place))
    manifest = {
        "version": "v1",
        "parent": "",
        "created_at": "",
        "kickoff_time": "",
        "recipe": "digits",
        "recipe_version": "",
        "config": {},
        "data": "",
        "data_fingerprint": "",
        "num_train_samples": 1,
        "num_test_samples": 1,
        "metrics": {},
        "parent_metrics": {},
        "code_version": "",
        "execution": "",
        "sha256": "",
        "bytes": 9,
        "file": "model_state.pt",
    }
    if field == "file":
        manifest["file"] = name
    contents = json.dumps(manifest).encode()
    pointer = {
        "version": "v1",
        "parent": "",
        "held_since": "",
        "manifest_sha256": hashlib.sha256(contents).hexdigest(),
    }
    if field != "file":
        pointer[field] = name
    if (field, name) == ("parent", None):
        pytest.skip("null is a valid parent: the first version has none before it")
    (place / "versions" / "v1").mkdir(parents=True)
    (place / "versions" / "v1" / "manifest.json").write_bytes(contents)
    (place / "champion.json").write_text(json.dumps(pointer))
    with pytest.raises(ChampionError, match="damaged"):
        store.manifest()
    with pytest.raises(ChampionError, match="damaged"):
        store.load()


@pytest.mark.parametrize("name", ["../victim.txt", "/etc/hostname", "victim.txt", "step-1.pt"])
def test_a_checkpoint_has_files_of_checkpoints_alone(place, name):
    with pytest.raises(Damaged, match="its manifest names"):
        read_file(Storage(str(place)), {"file": name, "bytes": 9, "checksum": ""})


def test_an_index_names_shards_of_its_own_place(place):
    def write(name, file="flyte_ddp_index.npz"):
        one = {"samples": np.array([1]), "sizes": np.array([1]), "versions": np.array([b""])}
        np.savez(place / file, names=np.array([name.encode()], dtype=bytes), **one)
        return str(place / file)

    source = Source(str(place), timeout=1)
    for name in ("../victim.tar", "/etc/passwd", "a/../../victim.tar"):
        write(name)
        with pytest.raises(DataError, match=f"expected an index of shards, .*{EXPECTED}"):
            read_index(source, "")
        (place / "flyte_ddp_index.npz").unlink()
        shards = [{"zip_data": None, "raw_data": {"basename": name, "bytes": 1}, "samples": 1}]
        (place / "index.json").write_text(json.dumps({"shards": shards}))
        with pytest.raises(DataError, match=f"expected an index of shards, .*{EXPECTED}"):
            read_index(source, "")
    listed = Source((f"{place}/a.tar", f"{place}/b.tar"), timeout=1)
    assert len(read_index(listed, write(f"{place}/a.tar", "list.npz"))) == 1
    with pytest.raises(DataError, match="^index: expected shards of the list, got '/etc/passwd'"):
        read_index(listed, write("/etc/passwd", "list.npz"))
