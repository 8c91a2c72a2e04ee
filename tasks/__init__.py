"""The tasks: declarations, whose functions are those of `flyte_ddp.flyte`."""
