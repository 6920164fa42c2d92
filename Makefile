# Everything a developer needs; `make` alone lists it. Needs python3 (3.11 or newer), make and a package index.

PYTHON ?= python3
RUNS ?= 20
INPUTS ?= 1000000
# Of the tests, which wait as much as they compute; each of them starts some of its own. 0: none but this one, for --pdb.
PROCESSES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 4); [ $$n -gt 3 ] && echo $$n || echo 3)
# For test-versions: of torch, oldest, newest or a version, each also on another Python (newest@3.13); or integrations.
VERSIONS ?= oldest newest newest@3.13 integrations
# For the images: a mirror's --build-arg, or --network=host under a proxy.
BUILD_ARGS ?=
# torch in the trainer's image: cuda or cpu, each with a lock in images/.
TORCH ?= cuda
# The tests start hundreds of interpreters: each would compile every module anew where this is set.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What packs the project, a few MB; .venv has torch and all that the tests need.
PACKING := build/packaging
CHART := build/chart/virtualflow
# Of the images of a release, once they are built: sha256:...
OPERATOR_DIGEST ?=
export OPERATOR_DIGEST
# What resolves the locks of the images.
LOCKING := build/locking
PIP_INSTALL := -m pip install $$([ -t 2 ] || echo -qq) --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-all test-versions lint docs e2e chaos fuzz campaign bench gpu lock dist image image-old clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## set up .venv with the library and its development tools

demo: $(STAMP) ## watch a job being resized, drained and killed, and end in the same bits
	@$(BIN)/python examples/demo.py

test: $(STAMP) ## run the tests that take under five minutes in all; ARGS="-k digits" selects
	@$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal $(ARGS)

test-slow: $(STAMP) ## run the whole stories that test leaves out
	@$(BIN)/python -m pytest --slow -m slow -n $(PROCESSES) --dist worksteal $(ARGS)

test-all: $(STAMP) ## run all tests, with more examples: every night, and before a release
	@$(BIN)/python -c 'import datasets, lightning, mlflow, nbclient, peft, tensorboard, transformers, wandb, webdataset' 2>/dev/null || $(BIN)/python $(PIP_INSTALL) -e '.[trainer,integrations]' -c constraints.txt
	@$(BIN)/python -m pytest --nightly -n $(PROCESSES) --dist worksteal $(ARGS)

test-versions: $(STAMP) ## run what computes on the oldest and newest torch, Python 3.13 and the newest integrations; VERSIONS="2.6.0"
	@$(BIN)/python tests/versions.py $(VERSIONS)

lint: $(STAMP) ## check style, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation site in build/site; every warning and dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@! grep -rlE '<(script|img|link)[^>]*(src|href)="?https?://' build/site --include='*.html' || { echo "these pages load something from another host" >&2; exit 1; }
	@echo "build/site/index.html"

e2e: $(STAMP) ## test on the cluster of KUBECONFIG, or on a kind cluster of its own
	@$(BIN)/python -m pytest --timeout=900 tests/e2e $(ARGS)

chaos: $(STAMP) ## compare RUNS random schedules (20) bit for bit with an undisturbed run
	@VIRTUALFLOW_CHAOS_RUNS=$(RUNS) $(BIN)/python -m pytest --nightly --timeout=0 tests/trainer/jobs/test_chaos.py $(ARGS)

fuzz: $(STAMP) ## give readers and a coordinator INPUTS (a million) random and mutated inputs; ARGS="--seed 7 manifests"
	@PYTHONPATH=trainer:operator:tests:tests/unit:tests/trainer $(BIN)/python -m fuzz --inputs $(INPUTS) $(ARGS)

campaign: $(STAMP) ## part, slow, stop and kill real jobs in network namespaces, as root; ARGS="--faults 2000"
	@PYTHONPATH=trainer:. $(BIN)/python -m faults $(ARGS)

bench: $(STAMP) ## measure beside plain PyTorch, DDP and torchrun, and write docs/explanation/benchmarks.md; ARGS="steps --quick"
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python $(PIP_INSTALL) -e '.[trainer,bench]' -c constraints.txt
	@PYTHONPATH=trainer:. $(BIN)/python -m benchmarks $(ARGS)

gpu: $(STAMP) ## run all that needs a GPU, in under ten minutes, and write docs/explanation/gpu.md; ARGS="steps memory"
	@PYTHONPATH=trainer:. $(BIN)/python -m benchmarks.gpu $(ARGS)

lock: $(LOCKING)/.installed ## write the locks in images/, from which the images install, and their licences; needs no .venv
	@$(LOCKING)/bin/python images/lock.py

dist: ## write wheel, sdist, bill of materials and hashes to dist/, and the chart where helm is; OPERATOR_DIGEST=sha256:...
	@command -v helm >/dev/null || echo "the chart is left out: helm, which packs it, is not on the PATH (Helm 3.8 or newer, https://helm.sh)" >&2
	@$(MAKE) --no-print-directory $(PACKING)/.installed
	@rm -rf dist
	@$(PACKING)/bin/python -m hatchling build -d dist
	@if command -v helm >/dev/null; then $(MAKE) --no-print-directory $(CHART) && helm package $(CHART) --destination dist; fi
	@$(PACKING)/bin/python images/sbom.py dist
	@ls dist

# The chart as it is packaged: it names the operator's image by the digest, where that is given.
$(CHART): FORCE
	@rm -rf $@ && mkdir -p $(dir $@) && cp -RL charts/virtualflow $@
	@sed 's|^  digest: ""$$|  digest: "$(OPERATOR_DIGEST)"|' charts/virtualflow/values.yaml >$@/values.yaml
FORCE:

image: ## build virtualflow-operator:dev and virtualflow-trainer:dev; TORCH=cpu for nodes without GPUs
	docker build $(BUILD_ARGS) --target operator -t virtualflow-operator:dev .
	docker build $(BUILD_ARGS) --build-arg TORCH=$(TORCH) --target trainer -t virtualflow-trainer:dev .

image-old: ## build both images of another commit with the tag old, for the test of upgrades: OLD=v0.1.0
	git archive $(OLD) | docker build $(BUILD_ARGS) --target operator -t virtualflow-operator:old -
	git archive $(OLD) | docker build $(BUILD_ARGS) --build-arg TORCH=$(TORCH) --target trainer -t virtualflow-trainer:old -

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define check_python
	@command -v $(PYTHON) >/dev/null || { echo "no '$(PYTHON)' here: install Python 3.11 or newer, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but 3.11 or newer is needed: say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
endef

# A stamp is touched last, so an interrupted set-up starts over.
$(STAMP): pyproject.toml constraints.txt
	$(check_python)
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python $(PIP_INSTALL) -e '.[trainer,operator,dev,docs]' -c constraints.txt
	@touch $@
	@echo "set up; to have virtualflow on the PATH: source $(VENV)/bin/activate"

$(PACKING)/.installed: images/build.txt
	$(check_python)
	@$(PYTHON) -m venv --clear $(PACKING)
	@$(PACKING)/bin/python $(PIP_INSTALL) --require-hashes -r $<
	@touch $@

$(LOCKING)/.installed:
	$(check_python)
	@$(PYTHON) -m venv --clear $(LOCKING)
	@$(LOCKING)/bin/python $(PIP_INSTALL) --upgrade pip packaging uv
	@touch $@
