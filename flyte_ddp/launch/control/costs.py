"""What a run costs: the price of its nodes, and the end of a run that has cost `max_cost`.

The prices are the table `prices` of the project's settings.toml. `RunState.cost` adds up the cost.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Mapping

from flyte_ddp.cluster.kubernetes.api import locate_nodes
from flyte_ddp.code.source_code import read_settings
from flyte_ddp.config.fields import Limits, check
from flyte_ddp.errors import ClusterError, ConfigError
from flyte_ddp.events import AttemptEnded, AttemptStarted, CheckpointWritten, Event, RunState
from flyte_ddp.launch.control.nodes import Nodes
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.signals import Limit
from flyte_ddp.storage import Storage

logger = logging.getLogger(__name__)


class Costs(Limit):
    """Knows the prices of nodes. It is a listener that ends the run at `max_cost`.

    Args:
        storage: where the cost of earlier attempts is kept.

    Raises:
        ConfigError: a wrong price, a `max_cost` without prices, or nothing of it is left.
    """

    def __init__(self, job: Job, storage: Storage | None, end: Callable[[], object]) -> None:
        self.max_cost, self._storage = job.program.needs.max_cost, storage
        super().__init__("max_cost", f"{self.max_cost:g}", end)
        prices = read_settings().get("prices", {})
        self.prices = check("prices", prices, dict[str, float], Limits(minimum=0))
        if self.max_cost and not self.prices:
            raise ConfigError("max_cost: expected a table `prices` in settings.toml, got none")
        self._file, self._earlier = f"cost-{job.run}", 0.0
        if self.max_cost and storage:
            self._earlier = float(storage.read_if_there(self._file) or 0)
            if self._earlier >= self.max_cost:
                raise ConfigError(self._message)

    def find_price(self, nodes: Nodes, waiting_since: float) -> tuple[float, float]:
        """Return the price of the nodes per hour, and what they would have cost between
        `waiting_since` and the start of their pods. Both are 0 if a price is not known.

        A spare node costs as much as the mean node, whether its pod has found room or not: nobody
        knows at the start when it will.

        Raises:
            ConfigError: there is a `max_cost`, and a node without a price.
        """
        price = absent_cost = 0.0
        if not self.prices:
            return price, absent_cost
        workers = [each.worker for each in nodes.nodes]
        try:
            for labels, started_at in locate_nodes(workers, nodes.namespace):
                own = self._find_own_price(labels)
                price += own
                absent_cost += own * max(0.0, started_at - waiting_since) / 3600
        except (ClusterError, ConfigError) as error:
            if self.max_cost:
                raise ConfigError(f"max_cost: expected a price of each node: {error}") from None
            logger.warning("what this run costs is not known: %s", error)
            return 0.0, 0.0
        factor = 1 + nodes.num_spares / len(workers)
        return factor * price, factor * absent_cost

    def _find_own_price(self, labels: Mapping[str, str]) -> float:
        texts = [f"{name}={value}" for name, value in labels.items()]
        for pattern, price in self.prices.items():
            if fnmatch.filter(texts, pattern):
                return float(price)
        raise ConfigError(
            f"prices: expected a label of each node, such as {texts[:1]}, got {[*self.prices]}"
        )

    def handle(self, event: Event, state: RunState) -> None:
        if not self.max_cost:
            return
        cost = self._earlier + state.cost().get("total", 0.0)
        if isinstance(event, AttemptStarted):
            left = 3600 * (self.max_cost - cost) / max(1e-9, event.price)
            self.start(max(1e-3, left))
        elif isinstance(event, AttemptEnded | CheckpointWritten) and self._storage:
            self._storage.write(self._file, str(cost).encode())

    def close(self, error: BaseException | None) -> None:
        self.cancel()
