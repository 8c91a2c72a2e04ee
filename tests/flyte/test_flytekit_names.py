"""Private names of flytekit: each is still there. Without the names of Decks, only Decks go."""

from __future__ import annotations

import inspect

import pytest
from flytekit import Deck, FlyteContextManager, PythonFunctionTask, task
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.type_engine import DataclassTransformer
from flytekit.deck import deck

from flyte_ddp.flyte.deck import open_deck, render_decks, write_local_decks


def context_of_task():
    """Return the context of a task that has no Decks yet."""
    context = FlyteContextManager.current_context()
    parameters = context.user_space_params.builder()
    parameters.decks, parameters.enable_deck = [], True
    state = context.new_execution_state().with_params(user_space_params=parameters.build())
    return FlyteContextManager.with_context(context.with_execution_state(state))


def test_flytekit_still_has_the_names(tmp_path):
    for name in ("_write_decks", "_output_to_literal_map", "_literal_map_to_python_input"):
        assert callable(getattr(PythonFunctionTask, name))
    assert inspect.isfunction(DataclassTransformer._fix_dataclass_int)
    checkpoint = SyncCheckpoint(str(tmp_path / "this"), str(tmp_path / "last"))
    assert checkpoint._checkpoint_dest == str(tmp_path / "this")
    assert checkpoint._checkpoint_src == str(tmp_path / "last")


def test_the_report_replaces_its_deck(monkeypatch):
    monkeypatch.setattr(Deck, "publish", lambda: None)
    with context_of_task() as context:
        publish = open_deck()
        for page in ("<p>old</p>", "<p>new</p>"):
            publish(page)
        shown = [each.html for each in context.user_space_params.decks if each.name == "Training"]
    assert shown == ["<p>new</p>"]


@pytest.mark.parametrize("has_names", [True, False])
def test_decks_of_flytekit_are_left_out_without_its_names(has_names, monkeypatch):
    written = []

    @task(enable_deck=True)
    def work() -> int:
        return 1

    class Unknown:
        enable_deck = True

    monkeypatch.setattr(deck, "_output_deck", lambda *given: written.append(given))
    if not has_names:
        monkeypatch.delattr(deck, "_output_deck")
    with context_of_task() as context:
        parameters = context.user_space_params
        Deck("Own", "<p>own</p>")
        pages = dict(render_decks(work if has_names else Unknown(), {}, {"o0": 1}, context))
        write_local_decks("work", parameters)
    assert pages["Own"] == "<p>own</p>"
    assert ("Source Code" in pages) == has_names
    assert written == [("work", parameters)][:has_names]
