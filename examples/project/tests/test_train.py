"""The function trains in two ranks, as the task that is registered does."""

from workflows.train import train


def test_the_function_learns():
    assert train(lr=0.1, steps=30) < 1.0
