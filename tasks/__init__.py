"""The tasks: declarations, whose functions are those of `flyte_ddp.flyte`."""

from flyte_ddp.flyte.shipping import check_code, prepare_registration

check_code()
prepare_registration()
