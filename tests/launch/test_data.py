"""Which nodes see the driver's data, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

from flyte_ddp.launch.nodes.dask import data
from flyte_ddp.recipes.prepare import NOTE


def test_workers_are_asked_once_whether_they_see_the_data(tmp_path, monkeypatch):
    """A restart does not wait for a thousand answers. A process that starts anew is asked again."""
    (tmp_path / NOTE).write_text("{}")
    seeing, asked = {"a": True, "b": True, "c": TimeoutError()}, []

    def call_workers(client, addresses, *arguments):
        asked.append(list(addresses))
        return {address: seeing[address] for address in addresses}

    def nodes(*has_plugin):
        pairs = zip("abc", has_plugin, strict=True)
        return [SimpleNamespace(address=each, has_plugin=there) for each, there in pairs]

    monkeypatch.setattr(data, "call_workers", call_workers)
    shared = data.SharedData(None, archive="already there")
    assert shared.locate(None, str(tmp_path), nodes(False, False, False)) == {"a", "b"}
    seeing |= {"b": False, "c": True}
    assert shared.locate(None, str(tmp_path), nodes(True, False, True)) == {"a", "c"}
    assert shared.locate(None, str(tmp_path), nodes(True, True, True)) == {"a", "c"}
    assert asked == [["a", "b", "c"], ["b", "c"], []]
