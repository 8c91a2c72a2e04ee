"""Links to a task's W&B run: in Flyte's console, and in the report."""

from __future__ import annotations

from flytekit.core.utils import ClassDecorator

from flyte_ddp.events import Event
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.observers.weights_and_biases import Wandb
from tasks.resources import WANDB_ENVIRONMENT, WANDB_MODE


class wandb_link(ClassDecorator):
    """Links the task in Flyte's console to its W&B run, where registration knows the entity that the run belongs to.

    `flytekitplugins.wandb.wandb_init` does that too, but it also starts the run itself: only with a key, never offline,
    under an id that changes with every attempt, and a failure of W&B ends the task. Its link types take the attempt for
    part of the id, so ours has a name of its own; the console needs the template in deploy/README.md.
    """

    def execute(self, *args: object, **kwargs: object) -> object:
        return self.task_function(*args, **kwargs)

    def get_extra_config(self) -> dict[str, str]:
        entity = WANDB_ENVIRONMENT.get("WANDB_ENTITY")
        if WANDB_MODE != "online" or not entity:
            return {}
        return {
            self.LINK_TYPE_KEY: "wandb-run",
            "host": WANDB_ENVIRONMENT.get("WANDB_BASE_URL", "https://wandb.ai").replace("//api.", "//"),
            "entity": entity,
            "project": WANDB_ENVIRONMENT["WANDB_PROJECT"],
        }


class ReportLink:
    """A listener that adds the W&B run's URL to the report when W&B has answered."""

    def __init__(self, wandb: Wandb, report: Page) -> None:
        self.wandb = wandb
        self.report = report

    def handle(self, event: Event) -> None:
        if self.wandb.url:
            self.report.links["W&B run"] = self.wandb.url

    def close(self, error: BaseException | None) -> None:
        pass
