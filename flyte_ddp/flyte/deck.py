"""The Decks of a task: its report, while it runs, and the Decks of a function and of flytekit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flytekit import Deck, FlyteContext, PythonFunctionTask
from flytekit.core.context_manager import FlyteContextManager
from flytekit.deck import deck
from flytekit.loggers import logger as flytekit_logger

DECK_NAME = "Training"


class _ReportDeck(Deck):  # type: ignore[misc]
    """A Deck whose content is replaced."""

    page = ""

    @property
    def html(self) -> str:
        return self.page


def open_deck() -> Callable[[str], None] | None:
    """Return the function that shows a fragment of HTML as the Deck "Training" of the current task;
    None outside a task with Decks.
    """
    parameters = FlyteContextManager.current_context().user_space_params
    if parameters is None or not parameters.enable_deck:
        return None
    own = _ReportDeck(DECK_NAME)

    def publish(html: str) -> None:
        own.page = html
        try:
            Deck.publish()  # flytekit itself logs most errors.
        except OSError as error:  # The local disk is full or not writable.
            flytekit_logger.error("The report could not be published: %s", error)

    return publish


def write_local_decks(name: str, parameters: Any) -> None:
    """Write the Decks of a local run to a file, as flytekit does in a pod; none without its
    private function.
    """
    write = getattr(deck, "_output_deck", None)
    if write:
        write(name, parameters)


def render_decks(
    task: PythonFunctionTask[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    context: FlyteContext,
) -> list[tuple[str, str]]:
    """Return the function's own Decks, and flytekit's Decks of inputs, outputs and source, as pairs
    of a name and HTML. flytekit's Decks need its private method.
    """
    if not task.enable_deck:
        return []
    parameters = context.user_space_params
    write = getattr(task, "_write_decks", None)
    if write:
        write(inputs, outputs, context, parameters)
    return [
        (each.name, each.html)
        for each in parameters.decks
        if not isinstance(each, deck.TimeLineDeck)
    ]
