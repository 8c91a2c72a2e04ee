"""The configuration of a run and of a checkout: hyperparameters, checked fields, and what code
travels.
"""

from flyte_ddp.config.training import PARALLELISMS, Monitor, TrainingConfig, resolve

__all__ = ["PARALLELISMS", "Monitor", "TrainingConfig", "resolve"]
