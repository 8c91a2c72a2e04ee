"""A recipe for graphs, which tells rings from stars. A batch is one large graph: the nodes of all
its graphs, and their edges, (2, E). So its tensors do not begin with the batch, and `num_samples`
returns how many graphs it has. Graphs without an edge are left out of the training.

cp examples/recipes/graphs.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.graphs.Graphs
"""

import torch
from torch import nn

from flyte_ddp import Recipe

NUM_TRAIN, NUM_TEST, WIDTH = 240, 60, 16


def make_graph(number: int) -> dict[str, torch.Tensor]:
    """Return a ring or a star of some nodes; each 20th graph has lost its edges."""
    generator = torch.Generator().manual_seed(number)
    size = int(torch.randint(4, 10, (), generator=generator))
    others = torch.arange(size)
    edges = torch.stack([others, (others + 1) % size if number % 2 else torch.zeros_like(others)])
    if number % 20 == 19:
        edges = edges[:, :0]
    return {"nodes": torch.rand(size, 3, generator=generator), "edges": edges}


class Net(nn.Module):
    """A sum over neighbours, and a mean over the nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes, (source, target) = batch["sizes"], batch["edges"]
        nodes = torch.relu(self.embed(batch["nodes"]))
        nodes = torch.relu(self.mix(nodes.index_add(0, target, nodes[source])))
        graph = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        sums = nodes.new_zeros(len(sizes), WIDTH).index_add(0, graph, nodes.square())
        return self.head(sums / sizes[:, None])  # (B, 2)


class Graphs(Recipe):
    defaults = {"epochs": 10, "global_batch_size": 16, "learning_rate": 0.02}
    class_names = ("star", "ring")

    def prepare(self, source, directory):
        return f"{NUM_TRAIN + NUM_TEST} drawn graphs"

    def datasets(self, directory):
        graphs = [(make_graph(number), number % 2) for number in range(NUM_TRAIN + NUM_TEST)]
        return graphs[:NUM_TRAIN], graphs[NUM_TRAIN:]

    def model(self):
        return Net()

    def collate(self, samples, training):
        if training:
            samples = [each for each in samples if each[0]["edges"].numel()]
        if not samples:
            return None  # another graph stands in for them, with weight 0
        graphs, labels = zip(*samples, strict=True)
        sizes = torch.tensor([len(each["nodes"]) for each in graphs])
        starts = (sizes.cumsum(0) - sizes).tolist()
        edges = [each["edges"] + start for each, start in zip(graphs, starts, strict=True)]
        nodes = torch.cat([each["nodes"] for each in graphs])
        batch = {"nodes": nodes, "edges": torch.cat(edges, dim=1), "sizes": sizes}
        return batch, torch.tensor(labels)

    def num_samples(self, inputs, targets):
        return len(inputs["sizes"])
