# One command a job; `make help` lists them. Needs Linux, Python 3.10 to 3.12, make and a network to the package registry.
PINNED := requirements.txt requirements-dev.txt
include project.mk

# The platform of the image: Debian 12's Python.
IMAGE_PLATFORM := --python-version 3.11 --python-platform x86_64-manylinux_2_28
PINS := requirements.txt requirements-dev.txt requirements-uv.txt
# Three at a time on two cores, because a test's ranks often wait. A file's tests stay together, because they share what
# they started; tests/conftest.py has the order of the files.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: test test-long test-all test-docs emulators test-gpu test-kubernetes test-flyte lint audit format bench soak sbom wheel requirements

test: $(INSTALLED)  ## the tests that need nothing but this machine, in eight minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) -m 'not long and not slow and not gpu and not kubernetes and not flyte'

test-long: $(INSTALLED)  ## the next longest tests, in four minutes: losses, several nodes, outages
	$(BIN)/python -m pytest $(PARALLEL) -m 'long and not slow'

test-all: $(INSTALLED)  ## also these and the slow ones
	$(BIN)/python -m pytest $(PARALLEL) -m 'not gpu and not kubernetes and not flyte'

test-docs: $(INSTALLED)  ## every command and piece of code in the README, docs/ and examples/, and what else users start with
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow -k 'not announced_loss_growth' tests/test_docs.py tests/test_example_scripts.py \
	  tests/test_integrations.py tests/test_project.py tests/test_mlflow.py tests/test_flyte2.py tests/test_stores.py \
	  tests/test_storage.py tests/test_ownership.py tests/test_champion.py

EMULATORS := build/emulators
emulators: $(EMULATORS)/fake-gcs-server $(EMULATORS)/node_modules/.bin/azurite-blob  ## of Google's and Azure's stores, for the tests, which fetch them too; needs Go and npm

$(EMULATORS)/fake-gcs-server:
	GOBIN=$(abspath $(EMULATORS)) go install github.com/fsouza/fake-gcs-server@v1.56.1

$(EMULATORS)/node_modules/.bin/azurite-blob:
	npm install --silent --no-audit --prefix $(EMULATORS) azurite@3.35.0

test-gpu: $(INSTALLED)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

test-kubernetes: $(INSTALLED)  ## the tests on the cluster that KUBECONFIG names, whose nodes have IMAGE
	FLYTE_DDP_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest -m kubernetes tests/kubernetes

test-flyte: $(INSTALLED)  ## real executions on the Flyte that FLYTECTL_CONFIG names, whose nodes (KUBECONFIG) have IMAGE
	FLYTE_DDP_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest -v -rP -m flyte tests/flyte

lint: $(INSTALLED)  ## ruff, and mypy, strict on flyte_ddp/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: $(INSTALLED)  ## known vulnerabilities of the pinned packages; fails too where it could not ask about all of them
	@$(BIN)/pip-audit $(addprefix --requirement ,$(PINS)) --no-deps --disable-pip --progress-spinner off > .audit 2>&1 \
	  && ! grep -q 'could not be audited' .audit \
	  || { grep -v 'could not be audited' .audit; \
	    echo "pip-audit: $$(grep -c 'could not be audited' .audit) of $$(cat $(PINS) | grep -c '^[a-z0-9].*==') pins were not audited"; \
	    exit 1; }

format: $(INSTALLED)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## compare with alternatives: ratios, each pair measured in one run; ONLY="start recovery" for some rows
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

soak: $(INSTALLED)  ## ten minutes of random kills, evictions and returns: samples, weights, goodput; SEED=1 FAULTS=20 MINUTES=10 ANNOUNCED=0 PROGRAM=recipe|function
	$(BIN)/python -m benchmarks.soak $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ANNOUNCED),--announced $(ANNOUNCED)) $(if $(PROGRAM),--program $(PROGRAM))

sbom: $(INSTALLED)  ## the image's Python packages with their hashes, as CycloneDX in sbom.json
	$(UV) pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes $(IMAGE_PLATFORM) requirements.txt \
	  | $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	    --output-file sbom.json -

wheel: $(INSTALLED)  ## the library, and what `flyte-ddp new` makes a project of, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# The image installs requirements.txt, a checkout also requirements-dev.txt: the pins that requirements.txt does not have,
# constrained to it.
PIN := $(UV) pip compile --quiet --no-emit-index-url --generate-hashes --custom-compile-command 'make requirements' $(UPGRADE)
EVERYWHERE := --universal --python-version 3.10

requirements: UPGRADE ?= --upgrade
requirements: | $(UV)  ## pin the newest packages that fit pyproject.toml; UPGRADE= keeps the pins that there are
	$(PIN) $(EVERYWHERE) --extra all --output-file requirements.txt pyproject.toml
	$(PIN) $(EVERYWHERE) --all-extras --no-annotate --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml
	awk 'FNR == NR { if (/^[a-z0-9]/) pinned[$$0]; next } /^[a-z0-9]/ { skip = $$0 in pinned } !skip' \
	  requirements.txt requirements-dev.txt > .pins && mv .pins requirements-dev.txt
	echo pytest | $(PIN) $(EVERYWHERE) --no-annotate \
	  --constraint requirements.txt --constraint requirements-dev.txt --output-file requirements-project.txt -
	echo uv | $(PIN) $(EVERYWHERE) --output-file requirements-uv.txt -
