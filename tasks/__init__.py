"""The tasks: declarations that call functions of `flyte_ddp.flyte`."""
