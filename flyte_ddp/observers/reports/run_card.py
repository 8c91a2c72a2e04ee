"""The run card: what a trained model is and where it comes from, as JSON and as a page of Markdown.

It is folded from the run's events, so a history is enough to make it again. What only the caller
knows, such as the image, is added by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from flyte_ddp.errors import log_failures
from flyte_ddp.events import RunFinished, RunState, plain, split_steps
from flyte_ddp.events.kinds import shorten_label
from flyte_ddp.observers.formats import duration, format_figure
from flyte_ddp.storage import redact_values, write_file

CARD_JSON, CARD_PAGE = "run_card.json", "README.md"  # the name under which model hubs show a page
UNKNOWN = "not known"
# places of champions, see `promotion.champion`
CHAMPION = re.compile(r"/versions/([^/]+)/model_state\.\w+(?: \(sha256 \w+\))?$")


def run_card(state: RunState, **origin: str) -> dict[str, Any]:
    """Return the card of a run that has started, as plain values that JSON has.

    Args:
        origin: what else is known of its code and its place, such as image and execution, by name;
            parent_champion is the version that it is to replace, if its weights do not come from
            one.
    """
    started = state.started
    assert started is not None
    finished = state.finished or RunFinished(step=state.last_step, seconds=0.0)
    initial_state = started.config.get("initial_model_state", "")
    parent = CHAMPION.search(initial_state)
    sizes = [
        *(len(epoch.rank_losses) for epoch in state.epochs if epoch.rank_losses),
        started.world_size,
    ]
    card = {
        "recipe": started.name,
        "data": {
            "description": started.data,
            "fingerprint": started.data_fingerprint,
            "license": started.data_license or UNKNOWN,
            "num_train_samples": started.num_train_samples,
            "num_test_samples": started.num_test_samples,
        },
        "origin": {
            **{name: value for name, value in origin.items() if value},
            "recipe_version": started.recipe_version,
            "commit": started.commit or None,
            "image": started.image or None,
            "arguments": started.arguments or None,
            "initial_model_state": initial_state or None,
            "parent_champion": parent[1] if parent else origin.get("parent_champion") or None,
        },
        "model": {
            "num_parameters": started.num_parameters,
            "epoch": finished.model_state_epoch,
            **({"class_names": started.class_names} if started.class_names else {}),
            "files": finished.exported,
            **({"missing": finished.not_exported} if finished.not_exported else {}),
        },
        "epochs": [{"epoch": each.position, **each.figures().values} for each in state.epochs],
        "best_epoch": finished.best_epoch,
        "ranks": {
            "world_sizes": list(dict.fromkeys(sizes)),
            "num_nodes": started.num_nodes,
            "device": started.device,
            "restarts": state.num_starts - 1 - state.num_announced_losses,
            "announced_losses": state.num_announced_losses,
        },
        "seconds": {"wall": state.time_spent().wall, **state.time_spent().parts()},
        "step_shares": split_steps(state.epochs),
        "cost": state.cost(),
        "versions": started.versions,
        "config": {**started.config, **started.named_arguments},
        "hidden": started.hidden,
    }
    return plain(redact_values(card))  # type: ignore[no-any-return]


def card_files(card: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the card as the contents of its two files."""
    text = json.dumps(card, indent=1, ensure_ascii=False, default=repr, allow_nan=False)
    pages = {CARD_JSON: f"{text}\n", CARD_PAGE: card_page(card)}
    return {name: page.encode(errors="backslashreplace") for name, page in pages.items()}


def write_card(url: str, card: Mapping[str, Any]) -> None:
    """Write the card into the directory at `url`. Does not raise: the run has ended."""
    with log_failures("run card"):
        for name, contents in card_files(card).items():
            write_file(f"{url}/{name}", contents, "checkpoints")


def _format(name: str, value: float | None) -> str:
    if value is None:
        value = math.nan
    return format_figure(name, value)


def card_page(card: Mapping[str, Any]) -> str:
    data, model, ranks, seconds = (card[name] for name in ("data", "model", "ranks", "seconds"))
    sizes = ", ".join(map(str, ranks["world_sizes"]))
    facts = {
        "Data": data["description"],
        "Its licence": data["license"],
        "Its fingerprint": data["fingerprint"],
        "Samples": (
            f"{data['num_train_samples']:,} to train on, {data['num_test_samples']:,} held out"
        ),
        "Parameters": f"{model['num_parameters']:,}",
        "Classes": ", ".join(map(shorten_label, model.get("class_names", ()))),
        "Weights": f"of epoch {model['epoch']}; the best is epoch {card['best_epoch']}",
        "Not exported": model.get("missing", ""),
        "Ranks": f"{sizes} on {ranks['num_nodes']} nodes ({ranks['device']})",
        "Restarts": f"{ranks['restarts']}, and {ranks['announced_losses']} announced losses",
        "Time": ", ".join(
            f"{name.replace('_', ' ')} {duration(each)}" for name, each in seconds.items() if each
        ),
        "Cost": ", ".join(
            f"{name.replace('_', ' ')} {each:,.2f}" for name, each in card.get("cost", {}).items()
        ),
        **{name.replace("_", " ").capitalize(): value for name, value in card["origin"].items()},
        "Versions": ", ".join(f"{name} {version}" for name, version in card["versions"].items()),
    }
    names = list(dict.fromkeys(name for epoch in card["epochs"] for name in epoch))
    config = json.dumps(card["config"], indent=1, ensure_ascii=False, default=repr)
    rows = [" | ".join(map(_format, names, map(each.get, names))) for each in card["epochs"]]
    lines = [
        *(f"# {card['recipe']}", "", "| | |", "|---|---|"),
        *(
            " ".join([f"| {name} |", *str(value).replace("|", "\\|").split(), "|"])
            for name, value in facts.items()
            if value
        ),
        *("", "## Epochs", ""),
        "| " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|---" * len(names) + "|",
        *(f"| {row} |" for row in rows),
        *("", "## Config", "", "```json", config, "```", ""),
    ]
    return "\n".join(lines)
