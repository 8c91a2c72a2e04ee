"""Distributed PyTorch training. This package knows PyTorch and has never heard of Flyte.

Start at `flyte_ddp.rank.trainer` for what a rank does, at `flyte_ddp.launch.spawn` for what starts and watches the
ranks, and at
`flyte_ddp.recipes` for what is trained.
"""
