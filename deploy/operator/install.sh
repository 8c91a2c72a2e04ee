#!/usr/bin/env bash
# Install the Dask operator without Helm and without its upstream image: its CRDs from the dask-kubernetes package, and
# its controller from the training image. Safe to run again, for an upgrade as well.
#
#   deploy/operator/install.sh IMAGE          PYTHON names another environment than .venv, which `make setup` makes
set -euo pipefail

image=${1:?usage: install.sh IMAGE}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
if ! "$python" -c 'import dask_kubernetes' 2>/dev/null; then
  echo "PYTHON: expected an environment with dask-kubernetes, got $python; make one with: make setup" >&2
  exit 2
fi
read -r version crds < <("$python" -c '
from importlib.metadata import version
from importlib.resources import files
print(version("dask-kubernetes"), files("dask_kubernetes") / "operator/deployment/helm/dask-kubernetes-operator/crds")')

# Server-side: a CRD with a pod's whole schema is too long for the annotation in which kubectl keeps what it applied.
kubectl apply --server-side --force-conflicts -f "$crds"
kubectl create namespace dask-operator --dry-run=client --output yaml | kubectl apply -f -
kubectl label --overwrite namespace dask-operator pod-security.kubernetes.io/enforce=restricted
sed -e "s|IMAGE\$|$image|" -e "s|VERSION\$|\"$version\"|" "$here/operator.yaml" | kubectl apply -f -   # the doctor reads it
kubectl --namespace dask-operator rollout status deployment/dask-operator --timeout "${TIMEOUT:-300s}"
