#!/usr/bin/env bash
# Copy the operator's CRDs from the pinned dask-kubernetes package to crds/, where the kustomization expects them. They are
# no part of this repository. Needed once for each version; install.sh does it too.
#
#   deploy/operator/crds.sh            PYTHON names another environment than .venv, which `make setup` makes
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
if ! "$python" -c 'import dask_kubernetes' 2>/dev/null; then
  echo "PYTHON: expected an environment with dask-kubernetes, got $python; make one with: make setup" >&2
  exit 2
fi
crds=$("$python" -c '
from importlib.resources import files
print(files("dask_kubernetes") / "operator/deployment/helm/dask-kubernetes-operator/crds")')
mkdir -p "$here/crds"
cp "$crds"/*.yaml "$here/crds/"
