# Everything a developer runs. `make demo` and `make test` do all there is to do on a fresh machine
# with make and Python 3.10 to 3.13; the other targets are parts of them.

PYTHON ?= python3
VENV := .venv
DATA := $(or $(DUALFORM_DATA),../shared/data)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := optimizers record store index engine replay serve client plot cli
# Folders with Python of ours that is no package.
LOOSE := examples experiments benchmarks

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format stubs stubs-check bench clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install dualform with all it needs to develop (torch is large: minutes at first, seconds later)

demo: $(STAMP) ## The whole job once on real digits: record, build, verify, serve, ask; answers in demo/
	@$(BIN)/python examples/digits_demo.py demo

test: $(STAMP) ## All tests; those that need MNIST take it from DUALFORM_DATA (default ../shared/data) or skip
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## Style, format, types (mypy strict) and the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES:%=-p dualform.%)
	$(BIN)/mypy $(LOOSE)
	$(BIN)/buf lint protos

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(STAMP) ## Generate the gRPC stubs beside the proto (Python 3.10 to 3.12)
	PYTHON=$(BIN)/python scripts/stubs.sh

stubs-check: $(STAMP) ## Fail where the committed stubs are not what the proto gives
	PYTHON=$(BIN)/python scripts/stubs.sh --check

bench: $(STAMP) ## A small benchmark in minutes, on MNIST from DUALFORM_DATA; `python -m benchmarks` has the full ones
	$(BIN)/python -m benchmarks recorder --data $(DATA)
	$(BIN)/python -m benchmarks topk --data $(DATA) --steps 320 --rounds 3 --largest-batch 64 --isotropic-rows 40000
	$(BIN)/python -m benchmarks answers --data $(DATA) --steps 320 --rounds 5

clean: ## Remove what the demo, the tests and builds leave behind; .venv stays
	rm -rf demo dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info[:2] <= (3, 13) else "dualform needs Python 3.10 to 3.13; this is " + sys.version.split()[0] + ": make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing dualform and its dependencies into $(VENV) (torch is large: minutes at first) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@
