"""The configuration of a run and of a checkout: hyperparameters, checked fields, and what code travels."""

from flyte_ddp.config.training import Monitor, TrainingConfig, reject_unknown_fields, resolve

__all__ = ["Monitor", "TrainingConfig", "reject_unknown_fields", "resolve"]
