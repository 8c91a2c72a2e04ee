"""Show a report as a Flyte Deck while its task runs."""

from __future__ import annotations

from collections.abc import Callable

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.loggers import logger as flytekit_logger

DECK_NAME = "Training"


def open_deck() -> Callable[[str], None] | None:
    """Return the function that shows a fragment of HTML as the Deck "Training" of the current task;
    None outside a task with Decks.
    """
    parameters = FlyteContextManager.current_context().user_space_params
    if parameters is None or not parameters.enable_deck:
        return None
    deck = Deck(DECK_NAME)

    def publish(html: str) -> None:
        deck._html = html
        try:
            Deck.publish()  # flytekit itself logs most errors.
        except OSError as error:  # The local disk is full or not writable.
            flytekit_logger.error("The report could not be published: %s", error)

    return publish
