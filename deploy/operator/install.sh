#!/usr/bin/env bash
# Install the Dask operator alone, without Helm and without its upstream image: its CRDs, and its controller from the
# training image. Safe to run again, for an upgrade as well.
#
#   deploy/operator/install.sh IMAGE          PYTHON names another environment than .venv, which `make setup` makes
set -euo pipefail

image=${1:?usage: install.sh IMAGE}
here=$(cd "$(dirname "$0")" && pwd)
"$here/crds.sh"
kubectl kustomize "$here" | sed "s|image: IMAGE\$|image: $image|" | kubectl apply -f -
kubectl --namespace dask-operator rollout status deployment/dask-operator --timeout "${TIMEOUT:-300s}"
