"""Show a report as a Flyte Deck while its task runs."""

from __future__ import annotations

from typing import Any

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.loggers import logger as flytekit_logger

from flyte_ddp.observers.reports.page import Page
from flyte_ddp.observers.reports.publisher import PagePublisher

DECK_NAME = "Training"


class DeckPublisher(PagePublisher):
    """Publishes `report` as the Deck "Training" of the current Flyte task. Outside a task with
    Decks it does nothing. The `options` are those of `PagePublisher`.
    """

    def __init__(self, report: Page, **options: Any) -> None:
        parameters = FlyteContextManager.current_context().user_space_params
        has_deck = parameters is not None and parameters.enable_deck
        self._deck = Deck(DECK_NAME) if has_deck else None
        super().__init__(report, self._publish_deck if has_deck else None, **options)

    def _publish_deck(self, html: str) -> None:
        assert self._deck is not None
        self._deck._html = html
        try:
            Deck.publish()  # which logs most errors
        except OSError as error:  # of a full or unwritable local disk
            flytekit_logger.error("The report could not be published: %s", error)
