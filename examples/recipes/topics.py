"""Several labels for each sample: the topics of a document by its words. scikit-learn draws
1,000 such documents.

cp examples/recipes/topics.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.topics.Topics
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flyte_ddp import MultiLabel


class Topics(MultiLabel):
    defaults = {
        "epochs": 30,
        "global_batch_size": 40,
        "learning_rate": 0.01,
        "monitor": {"metric": "f1", "mode": "max"},
    }
    class_names = ("sports", "politics", "science", "music", "travel")

    def prepare(self, source, directory):
        from sklearn.datasets import make_multilabel_classification

        words, labels = make_multilabel_classification(1000, 30, n_classes=5, random_state=0)
        torch.save(
            (torch.tensor(words).float() / words.std(), torch.tensor(labels)),
            directory / "documents.pt",
        )
        return "1,000 documents of 30 words each, every fifth held out"

    def datasets(self, directory):
        words, labels = torch.load(directory / "documents.pt", weights_only=True)
        held_out = torch.arange(len(words)) % 5 == 0
        return TensorDataset(words[~held_out], labels[~held_out]), TensorDataset(
            words[held_out], labels[held_out]
        )

    def model(self):
        return nn.Linear(30, 5)  # a logit for each label
