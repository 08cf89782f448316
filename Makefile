# Everything a developer types. `make help` lists it.
#
#   make demo PYTHON=python3.12             another interpreter
#   make test ARGS="tests/app -k claim"     fewer tests
#   make test TORCH=2.14.1                  another torch, in .venv-torch-2.14.1 (pip's own settings choose the index)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
USUAL_TORCH := 2.13.0
TORCH ?= $(USUAL_TORCH)
# For a build of torch that brings no Triton: the version that the usual torch brings elsewhere.
TRITON ?= 3.7.1
ARGS ?= tests

# A comma in an argument of `call`.
, := ,
VENV := $(if $(filter $(USUAL_TORCH),$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.developing
# Python compiles a module when it is first imported; most of these never are, and compiling all takes half of the time.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# A test that hangs is a failure with a traceback, not a lost afternoon.
TEST_TIMEOUT_S := 300

.PHONY: help install dev demo test long-test serve lint format typecheck gpu-test wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with the project

dev: $(DEV_STAMP)  ## make .venv with the project and its development tools; test, lint and typecheck do

# Torch first: it is settled before anything that depends on it, so no later step can replace it. A CPU build of torch
# brings no Triton; then ours does (Triton kernels are tested on the CPU by its interpreter).
define install_extras
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Flopwatch needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH) into $(VENV); the first time this downloads hundreds of megabytes, with CUDA gigabytes."
	@$(PIP) "torch==$(TORCH)"
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)' \
	  || $(PIP) "triton==$(TRITON)"
	@echo "Installing flopwatch[$(1)]."
	@$(PIP) "torch==$(TORCH)" --editable ".[$(1)]"
endef

$(STAMP): pyproject.toml
	$(call install_extras,worker$(,)plots)
	@touch $@

$(DEV_STAMP): pyproject.toml
	$(call install_extras,worker$(,)plots$(,)dev)
	@touch $(STAMP) $@

demo: install  ## run the main job end to end on a small sweep and print its table
	@$(BIN)/python -m tools.demo

test: dev  ## run the whole suite, on all cores
	@$(BIN)/python -m tools.suite --timeout=$(TEST_TIMEOUT_S) $(ARGS)

long-test: dev  ## the tests that take minutes, one by one: before a release
	@$(PIP) "kubernetes-validate>=1.32,<2"
	@$(BIN)/python -m pytest -m long --timeout=1200 $(ARGS)

serve: install  ## run server and worker on this host
	$(BIN)/flopwatch up

lint: dev  ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: dev  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: dev  ## mypy --strict
	$(BIN)/mypy

# On GPU hosts that lack the service's dependencies its tests are skipped.
gpu-test:  ## the tests that need a GPU; installs nothing: any python3 with torch and pytest will do
	@python3 -m tools.suite gpu $(ARGS)

wheel: dev  ## build dist/*.whl
	$(BIN)/python -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove everything that is not source
	rm -rf .venv .venv-torch-* build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
