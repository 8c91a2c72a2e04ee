#!/usr/bin/env bash
# Register all tasks, workflows and launch plans with the Flyte that flytekit's own configuration names.
#
#   make register REGISTRY=registry.example.com DRY_RUN=1
#   make register REGISTRY=registry.example.com GPUS=4 NOTIFY_EMAILS=team@example.com ACTIVATE="retrain_nightly"
#
# The image must be there before anything runs: make image IMAGE=registry.example.com/flyte-ddp:VERSION, and push it. Its
# code is what runs, so none is shipped beside it. What else is read from the environment: tasks/resources.py,
# tasks/registration.py.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=${VERSION:-$(git describe --always --dirty)}            # a version, once registered, cannot be changed
IMAGE=${IMAGE:-${REGISTRY:+$REGISTRY/}flyte-ddp:$VERSION}       # its name; IMAGE gives another
PROJECT=${PROJECT:-flytesnacks}
DOMAIN=${DOMAIN:-development}
SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-flyte-ddp}                   # of deploy/rbac.yaml; what launch plans run as
DRY_RUN=${DRY_RUN:-0}                                           # 1: say what would be registered, and reach nobody
ACTIVATE=${ACTIVATE:-}                                          # launch plans whose schedules are to start with this version

case $DRY_RUN in
  0) flags=() ;;
  1) flags=(--dry-run) ;;
  *) echo "DRY_RUN: '$DRY_RUN' is not a switch; accepted are 0 and 1" >&2; exit 2 ;;
esac
for plan in $ACTIVATE; do
  if ! grep -q "^        (\"$plan\", " workflows/retrain.py; then
    echo "ACTIVATE: '$plan' is no launch plan; accepted are those of the table in workflows/retrain.py" >&2
    exit 2
  fi
done

pyflyte register --project "$PROJECT" --domain "$DOMAIN" --version "$VERSION" --image "$IMAGE" \
  --service-account "$SERVICE_ACCOUNT" --copy none ${flags[@]+"${flags[@]}"} workflows
for plan in $ACTIVATE; do
  if [[ $DRY_RUN == 1 ]]; then
    echo "$plan would be activated as version $VERSION"
  else
    pyflyte launchplan --project "$PROJECT" --domain "$DOMAIN" --activate "$plan" "$VERSION"
  fi
done
