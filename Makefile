# One command a job; `make` prints the first five, `make help` lists all. Needs Linux, Python 3.10 to 3.12, make and a network to the package registry.
PYTHON ?= python3
# Before the default, so that the command line's counts here too.
MULTI_NODE_RECIPE := $(or $(RECIPE),pet_names)
RECIPE ?= digits
PROCESSES ?= 2
CONFIG ?= {}
DATA ?=
VENV := .venv
BIN := $(VENV)/bin
# The image in settings.toml; if it names none, a local name for tests on a cluster.
IMAGE ?= $(or $(shell $(BIN)/python -m flyte_ddp image 2>/dev/null),flyte-ddp:dev)
BUILDER ?= docker build
# uv from the path, or installed beside the environment by its pin. It takes seconds where pip takes minutes. It compiles no
# bytecode: the first run does that for what it imports, a fifth of all.
UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
INSTALLED := $(VENV)/.installed
# On the environment's path, with a link to the library alone: the checkout itself there would make its recipes/ and
# settings.toml another project's.
CHECKOUT := $(VENV)/checkout
# A script of sh and of Python, beside whose real place the interpreter is. It keeps the name by which it was called.
define PROGRAM
#!/bin/sh
'''exec' "$$(dirname "$$(readlink -f "$$0")")/python" "$$0" "$$@"
' '''
import sys
from flyte_ddp.__main__ import main
if __name__ == '__main__':
    sys.exit(main())
endef
export PROGRAM
# exists once the environment also has the packages of tests and checks
TESTED := $(VENV)/.tested
INSTALL := $(UV) pip install --quiet --python $(BIN)/python --require-hashes
export UV_SYSTEM_CERTS ?= 1
# Images of containers often set it. The checkout's modules would be compiled in every process that a run or a test starts.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := first
.PHONY: first help setup train train-multi-node image register

# `make` alone prints the five commands that a newcomer needs.
first:
	@printf '  %-50s %s\n' \
	  'make setup' 'the environment in .venv' \
	  'make train' 'train on handwritten digits with two processes' \
	  '.venv/bin/flyte-ddp train recipes.flowers.Flowers' "the README's recipe" \
	  '.venv/bin/flyte-ddp new my-project' 'a project of your own' \
	  'make help' 'everything else'

help:  ## what there is to make
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(INSTALLED)  ## the environment in .venv, with the pinned packages that training needs

$(INSTALLED): requirements.txt | $(UV)
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64" | "Darwin arm64") ;; \
	  *) echo "setup: expected Linux, or macOS on Apple silicon, which torch has wheels for, got $$(uname -sm)" >&2; exit 1 ;; esac
	$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(VENV)
	$(INSTALL) -r requirements.txt
	@printf '%s\n' "$$PROGRAM" > $(BIN)/flyte-ddp; chmod +x $(BIN)/flyte-ddp
	@mkdir -p $(CHECKOUT) && ln -sfn ../../flyte_ddp $(CHECKOUT)/flyte_ddp
	@for packages in $(VENV)/lib/python3*/site-packages; do echo ../../../checkout > $$packages/flyte-ddp.pth; done
	@touch $@

$(TESTED): requirements-dev.txt $(INSTALLED)
	$(INSTALL) -r requirements.txt -r requirements-dev.txt
	@touch $@

.uv/bin/uv: requirements.txt
	$(PYTHON) -m venv .uv
	sed -n '/^uv==/,/[^\\]$$/p' requirements.txt > .uv/pins.txt
	.uv/bin/pip install --quiet --require-hashes -r .uv/pins.txt
	@touch $@

train: $(INSTALLED)  ## train RECIPE (digits) with PROCESSES (2) DDP processes; CONFIG='{"epochs": 3}', DATA=directory
	$(BIN)/pyflyte run workflows/single_node.py single_node_training_wf --recipe $(RECIPE) \
	  --num_processes $(PROCESSES) --config '$(CONFIG)' $(if $(DATA),--data '$(DATA)')

train-multi-node: $(INSTALLED)  ## train RECIPE (pet_names) on two Dask workers on this machine, without Kubernetes
	$(BIN)/pyflyte run workflows/multi_node.py multi_node_training_wf \
	  --recipe $(MULTI_NODE_RECIPE) \
	  --cluster '{"kind": "local", "num_nodes": 2}' --config '$(CONFIG)' $(if $(DATA),--data '$(DATA)')

image: $(INSTALLED)  ## the image for tasks, driver, scheduler and workers, as settings.toml or IMAGE names it; BASE=, COMPILER=1, BUILDER='podman build'
	$(BUILDER) $(foreach name,IMAGE BASE COMPILER,$(if $($(name)),--build-arg $(name)=$($(name)))) -t $(IMAGE) .

register: $(INSTALLED)  ## all workflows with Flyte, by settings.toml; PROJECT=, DOMAIN=, VERSION=, DRY_RUN=1, ACTIVATE=1
	$(BIN)/python -m flyte_ddp register $(if $(PROJECT),--project $(PROJECT)) $(if $(DOMAIN),--domain $(DOMAIN)) \
	  $(if $(VERSION),--version $(VERSION)) $(if $(filter 1,$(DRY_RUN)),--dry-run) $(if $(filter 1,$(ACTIVATE)),--activate)

# The platform of the image: Debian 12's Python.
IMAGE_PLATFORM := --python-version 3.11 --python-platform x86_64-manylinux_2_28
PINS := requirements.txt requirements-dev.txt
# Four at a time on two cores, because a test's ranks often wait. Each process more takes 30 s of processor time to import
# all test files and what ranks need. A file's tests stay together, because they share what they started.
PARALLEL ?= -n 4 --dist loadfile --no-loadscope-reorder
# Longer tests keep the cores busy.
PARALLEL_LONG ?= $(PARALLEL:4=3)
# `make test-long` imports these files only.
LONG = $(shell grep -rl --include='test_*.py' 'mark\.long' tests | sort)

.PHONY: test test-long test-all test-docs emulators test-gpu test-kubernetes drills test-flyte test-flyte2 lint audit format bench bench-gpu soak sbom wheel requirements

test: $(TESTED)  ## the quick tests, which need nothing but this machine
	$(BIN)/python -m pytest $(PARALLEL) -m 'not long and not slow'

test-long: $(TESTED)  ## the tests above three seconds of processor time: losses, several nodes, outages
	$(BIN)/python -m pytest $(PARALLEL_LONG) -m 'long and not slow' $(LONG)

test-all: $(TESTED)  ## also these and the slow ones
	$(BIN)/python -m pytest $(PARALLEL)

test-docs: $(TESTED)  ## every command and piece of code in the README, docs/ and examples/, and what else users start with
	$(BIN)/python -m pytest tests/doors/test_examples_in_docstrings.py
	$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -m slow -k 'not announced_loss_growth' tests/doors/test_docs.py tests/doors/test_example_scripts.py \
	  tests/gang/test_integrations.py tests/gang/test_loader.py tests/doors/test_new_project.py tests/observers/test_mlflow.py tests/doors/test_flyte2.py tests/storage/test_stores.py \
	  tests/storage/test_storage.py tests/checkpoints/test_ownership.py tests/promotion/test_champion.py tests/doors/test_upgrade.py

EMULATORS := build/emulators
emulators: $(EMULATORS)/fake-gcs-server $(EMULATORS)/node_modules/.bin/azurite-blob  ## of Google's and Azure's stores, for the tests, which fetch them too; needs Go and npm

$(EMULATORS)/fake-gcs-server:
	GOBIN=$(abspath $(EMULATORS)) go install github.com/fsouza/fake-gcs-server@v1.56.1

$(EMULATORS)/node_modules/.bin/azurite-blob:
	npm install --silent --no-audit --prefix $(EMULATORS) azurite@3.35.0

test-gpu: $(TESTED)  ## the tests that need a GPU
	$(BIN)/python -m pytest tests/outside/gpu

test-kubernetes: $(TESTED)  ## the tests on the cluster that KUBECONFIG names, whose nodes have IMAGE
	FLYTE_DDP_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest --durations=0 --durations-min=5 tests/outside/kubernetes

drills: $(TESTED)  ## measure on the cluster of test-kubernetes what queues, evictions and fillers cost, and which nodes are named; takes an hour; needs FLYTE_DDP_TEST_BUILDER, and Go to build Kueue
	FLYTE_DDP_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest -s tests/outside/kubernetes/drill_queue.py tests/outside/kubernetes/drill_filler.py \
	  tests/outside/kubernetes/drill_nodes.py tests/outside/kubernetes/drill_causes.py

test-flyte: $(TESTED)  ## real executions on the Flyte that FLYTECTL_CONFIG names, whose nodes (KUBECONFIG) have IMAGE
	FLYTE_DDP_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest -v -rP tests/outside/flyte

SDK := build/flyte2
test-flyte2: IMAGE = my-project:dev
test-flyte2: $(TESTED) $(SDK)  ## real runs, from a new project, on the Flyte 2 that FLYTECTL_CONFIG names (its program `manager`, its CRD, an S3 such as moto: FLYTE_AWS_ENDPOINT and its keys); FLYTE_DDP_TEST_BUILDER builds its image for the nodes (KUBECONFIG), or they have it as IMAGE
	FLYTE_DDP_TEST_IMAGE=$(IMAGE) PYTHONPATH=$(abspath $(SDK)) $(BIN)/python -m pytest -v -rP tests/outside/flyte2

$(SDK):  # the SDK of Flyte 2 lies beside the environment and not in it
	$(UV) pip install --quiet --python $(BIN)/python --target $@ flyte==2.12.1

lint: $(TESTED)  ## ruff, mypy (strict on flyte_ddp/), sentences, and the rules of names and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/sentences.py flyte_ddp tasks workflows recipes examples tests benchmarks
	$(BIN)/python -m pytest --quiet -m '' tests/repository/test_imports.py tests/repository/test_private_names.py

audit: $(TESTED)  ## known vulnerabilities of the pinned packages; fails too where it could not ask about all of them
	@$(BIN)/pip-audit $(addprefix --requirement ,$(PINS)) --no-deps --disable-pip --progress-spinner off > .audit 2>&1 \
	  && ! grep -q 'could not be audited' .audit \
	  || { grep -v 'could not be audited' .audit; \
	    echo "pip-audit: $$(grep -c 'could not be audited' .audit) of $$(cat $(PINS) | grep -c '^[a-z0-9].*==') pins were not audited"; \
	    exit 1; }

format: $(TESTED)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TESTED)  ## compare with alternatives: ratios, each pair measured in one run; ONLY="start script" for some rows
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

# With the Python that has torch, without any set-up: PYTHON=python3.
bench-gpu:  ## compare training on a GPU with plain loops, in nine minutes, with the torch of PYTHON; ONLY=states,killed for some rows
	$(PYTHON) -m benchmarks.gpu $(if $(ONLY),--only $(ONLY))

soak: $(TESTED)  ## ten minutes of random kills, evictions and returns: samples, weights, goodput; SEED=1 FAULTS=20 MINUTES=10 ANNOUNCED=0 NODES=2 PROGRAM=recipe|function|shards
	$(BIN)/python -m benchmarks.soak $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ANNOUNCED),--announced $(ANNOUNCED)) $(if $(PROGRAM),--program $(PROGRAM)) $(if $(NODES),--nodes $(NODES))

sbom: $(TESTED)  ## the image's Python packages with their hashes, as CycloneDX in sbom.json
	$(UV) pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes $(IMAGE_PLATFORM) requirements.txt \
	  | $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	    --output-file sbom.json -

wheel: | $(UV)  ## the library, and what `flyte-ddp new` makes a project of, in dist/
	$(UV) build --quiet --wheel --python $(PYTHON) $(addprefix --build-constraints ,$(PINS)) --require-hashes --out-dir dist

# The image and training in a checkout have requirements.txt, tests also requirements-dev.txt: the pins that requirements.txt
# does not have, constrained to it. uv is in the first, because it installs the others. Flyte 2's SDK goes with one rich-click alone,
# and flytekit with any.
PIN := $(UV) pip compile --quiet --no-emit-index-url --generate-hashes --custom-compile-command 'make requirements' $(UPGRADE)
EVERYWHERE := --universal --python-version 3.10

requirements: UPGRADE ?= --upgrade
requirements: | $(UV)  ## pin the newest packages that fit pyproject.toml; UPGRADE= keeps the pins that there are
	printf 'uv\nrich-click==1.8.9\n' | $(PIN) $(EVERYWHERE) --extra all --output-file requirements.txt pyproject.toml -
	$(PIN) $(EVERYWHERE) --all-extras --no-annotate --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml
	awk 'FNR == NR { if (/^[a-z0-9]/) pinned[$$0]; next } /^[a-z0-9]/ { skip = $$0 in pinned } !skip' \
	  requirements.txt requirements-dev.txt > .pins && mv .pins requirements-dev.txt
