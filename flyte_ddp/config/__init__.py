"""The configuration of a run and of a checkout: hyperparameters, checked fields, and what code
travels.
"""

from flyte_ddp.config.training import OWN, PARALLELISMS, Monitor, TrainingConfig, resolve

__all__ = ["OWN", "PARALLELISMS", "Monitor", "TrainingConfig", "resolve"]
