"""The configuration of a run and of a checkout: hyperparameters, checked fields, and what code travels."""

from flyte_ddp.config.training import TrainingConfig, reject_unknown_fields, resolve

__all__ = ["TrainingConfig", "reject_unknown_fields", "resolve"]
