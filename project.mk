# What a project trains, ships and registers with. Makefile includes it, and has the rest. `make help` lists all commands.
PYTHON ?= python3
# Before the default, so that a project's own, or the command line's, counts here too.
MULTI_NODE_RECIPE := $(or $(RECIPE),pet_names)
RECIPE ?= digits
PROCESSES ?= 2
CONFIG ?= {}
DATA ?=
VENV := .venv
BIN := $(VENV)/bin
# The image in settings.toml; if it names none, a local name for tests on a cluster.
IMAGE ?= $(or $(shell $(BIN)/python -m flyte_ddp.flyte image 2>/dev/null),flyte-ddp:dev)
BUILDER ?= docker build
# A run ends with its summary, on standard error; on standard output pyflyte repeats all outputs, with each epoch's numbers.
QUIET := > /dev/null
# uv from the path, or installed beside the environment. It takes seconds where pip takes minutes, and resolves torch and
# torchvision to matching builds. It compiles the bytecode, so that no process compiles torch, which takes longer than
# everything else that a rank does before it trains.
UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
INSTALLED := $(VENV)/.installed
export UV_SYSTEM_CERTS ?= 1
# Images of containers often set it. The checkout's modules would be compiled in every process that a run or a test starts.
unexport PYTHONDONTWRITEBYTECODE

# A project has the wheel that flyte_ddp is installed from; in a checkout of flyte-ddp it lies beside this file, and
# `flyte-ddp` runs it from there.
WHEELS := $(wildcard wheels/*.whl)
# Likewise the packages of its own recipes, which must fit the pins.
OWN := $(wildcard requirements-own.txt)

.DEFAULT_GOAL := help
.PHONY: help setup train train-multi-node image register

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(INSTALLED)  ## the environment in .venv, with the pinned packages

$(INSTALLED): $(PINNED) $(WHEELS) $(OWN) | $(UV)
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64" | "Darwin arm64") ;; \
	  *) echo "setup: expected Linux, or macOS on Apple silicon, which torch has wheels for, got $$(uname -sm)" >&2; exit 1 ;; esac
	$(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes \
	  $(PINNED:%=-r %)
	$(if $(WHEELS),$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps $(WHEELS))
	$(if $(WHEELS),,@printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m flyte_ddp "$$@"\n' > $(BIN)/flyte-ddp; chmod +x $(BIN)/flyte-ddp)
	$(if $(OWN),$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python -c requirements.txt -r $(OWN))
	@touch $@

.uv/bin/uv: requirements-uv.txt
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --require-hashes -r requirements-uv.txt
	@touch $@

train: $(INSTALLED)  ## train RECIPE (digits) with PROCESSES (2) DDP processes; CONFIG='{"epochs": 3}', DATA=directory
	$(BIN)/pyflyte run workflows/single_node.py single_node_training_wf --recipe $(RECIPE) \
	  --num_processes $(PROCESSES) --config '$(CONFIG)' $(if $(DATA),--data '$(DATA)') $(QUIET)

train-multi-node: $(INSTALLED)  ## train RECIPE (pet_names) on two Dask workers on this machine, without Kubernetes
	$(BIN)/pyflyte run workflows/multi_node.py multi_node_training_wf \
	  --recipe $(MULTI_NODE_RECIPE) \
	  --cluster '{"kind": "local", "num_nodes": 2}' --config '$(CONFIG)' $(if $(DATA),--data '$(DATA)') $(QUIET)

image: $(INSTALLED)  ## the image for tasks, driver, scheduler and workers, as settings.toml or IMAGE names it; BASE=, COMPILER=1, BUILDER='podman build'
	$(BUILDER) $(foreach name,IMAGE BASE COMPILER,$(if $($(name)),--build-arg $(name)=$($(name)))) -t $(IMAGE) .

register: $(INSTALLED)  ## all workflows with Flyte, by settings.toml; PROJECT=, DOMAIN=, VERSION=, DRY_RUN=1, ACTIVATE=1
	$(BIN)/python -m flyte_ddp register $(if $(PROJECT),--project $(PROJECT)) $(if $(DOMAIN),--domain $(DOMAIN)) \
	  $(if $(VERSION),--version $(VERSION)) $(if $(filter 1,$(DRY_RUN)),--dry-run) $(if $(filter 1,$(ACTIVATE)),--activate)
