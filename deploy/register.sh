#!/usr/bin/env bash
# Register all tasks, workflows and launch plans with the Flyte that flytekit's own configuration names.
#
#   make register DRY_RUN=1
#   make register IMAGE=registry.example.com/flyte-ddp:1 GPUS=4 ACTIVATE=1
#
# settings.toml names the image and everything else that tasks and launch plans are registered with. The image must be
# there before anything runs: make image, and push it. Its code is what runs, so none is shipped beside it; a task that
# finds other code in it than was registered ends and says so.
set -euo pipefail
cd "$(dirname "$0")/.."

DRY_RUN=${DRY_RUN:-0}                                           # 1: print what would be registered, and send nothing
ACTIVATE=${ACTIVATE:-0}                                         # 1: start the schedule of the launch plan `retrain` with this version
for name in DRY_RUN ACTIVATE; do
  [[ ${!name} == [01] ]] || { echo "$name: expected 0 or 1, got '${!name}'" >&2; exit 2; }
done
flags=()
[[ $DRY_RUN == 0 ]] || flags=(--dry-run)
image=$(python -m flyte_ddp.flyte image)
version=${VERSION:-$(python -m flyte_ddp.flyte version)}                  # cannot be changed once registered: it counts code and settings
PROJECT=${PROJECT:-flytesnacks}
DOMAIN=${DOMAIN:-development}
SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-flyte-ddp}                   # of deploy/rbac.yaml; what launch plans run as

python -m flyte_ddp.flyte requests
if [[ $DRY_RUN == 0 ]]; then
  python -m flyte_ddp.flyte limits "$PROJECT" "$DOMAIN" "$version"        # before the registration, which else ends halfway
fi
pyflyte register --project "$PROJECT" --domain "$DOMAIN" --version "$version" --image "$image" \
  --service-account "$SERVICE_ACCOUNT" --copy none ${flags[@]+"${flags[@]}"} workflows
if [[ $ACTIVATE$DRY_RUN == 11 ]]; then
  echo "retrain would be activated as version $version"
elif [[ $ACTIVATE == 1 ]]; then
  pyflyte launchplan --project "$PROJECT" --domain "$DOMAIN" --activate retrain "$version"
fi
echo "version $version, image $image"
