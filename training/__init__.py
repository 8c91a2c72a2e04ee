"""Distributed PyTorch training. This package knows PyTorch and has never heard of Flyte.

Start at `training.loop` for what a rank does, at `training.launch.spawn` for what starts and watches the ranks, and at
`training.recipes` for what is trained.
"""
