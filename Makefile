# Each target makes .venv by itself, with what it needs and no more.
.DEFAULT_GOAL := help
.PHONY: help demo unit test lint bench soak ui format docs servers
SHELL := /bin/bash

PYTHON ?= python3
# Options of the demo: make demo DEMO='--machines 2 --windows 2'.
DEMO ?=
BIN := .venv/bin
# Without --no-compile, pip compiles all of a library, of which a run imports a small part. The pip
# that Python brings takes three times as long to resolve this as a new one.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt
# Nothing of a run may be sent anywhere but to its own Prefect server.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
# Many processes start here. Each one would compile what it imports: 40 % of the start of a flow.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make demo    a whole campaign on this machine: text sharded, machines rented, a model trained"
	@echo "make ui      look at the demo's runs in the Prefect UI (port 4200)"
	@echo "make unit    run the tests that need no server (a minute)"
	@echo "make test    run the tests of each change (root and Debian: installs what they need with apt)"
	@echo "make lint    ruff, pyright, import-linter"
	@echo "make docs    write docs/reference from the code"
	@echo "make bench   print the benchmarks' tables"
	@echo "make soak    run the long tests, and long kill and fault matrices"

.venv/empty:
	$(PYTHON) -m venv --upgrade-deps .venv
	@touch $@

.venv/demo: .venv/empty pyproject.toml constraints.txt
	$(PIP) --editable ".[demo]"
	@touch $@

# pip uses one processor, and reads the index for most of its time. So two unpack what was tested
# together, and a third adds what is missing on this version of Python.
.venv/dev: .venv/empty pyproject.toml constraints.txt
	grep -v '^ *#' constraints.txt | xargs -P 2 -n 60 $(PIP) --no-deps
	$(PIP) --editable ".[dev]"
	@touch $@

demo: .venv/demo
	@$(BIN)/python -m examples.demo $(DEMO)

ui: .venv/demo
	@$(BIN)/python -m examples.demo --ui

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	@deployments/lint.sh

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/dev
	$(BIN)/python -m docs.generate

# If a process of pytest dies, the run fails, and names the test. With a new process, it would hang.
# A test that hangs fails after 20 minutes.
PYTEST := $(BIN)/python -m pytest --max-worker-restart 0 --timeout 1200

# Tests write many small files. In memory, that takes a tenth less time, where there is room.
unit test: export TMPDIR := $(or $(TMPDIR),$(shell df --output=avail /dev/shm 2>/dev/null | awk \
	'END {print ($$1 > 8000000) ? "/dev/shm" : "/tmp"}'))

unit: .venv/dev
	$(PYTEST) tests/unit --numprocesses 3

servers:
	@deployments/test-servers.sh

test:
	@$(MAKE) --no-print-directory --jobs 2 servers .venv/dev
	$(PYTEST) --numprocesses 4 --dist loadgroup --no-loadscope-reorder --durations 60

bench: .venv/dev
	@deployments/test-servers.sh
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.formats
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.ray_shards
	$(BIN)/python -m benchmarks.resume
	$(BIN)/python -m benchmarks.swarm
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.gradients
	$(BIN)/python -m benchmarks.aggregator
	$(BIN)/python -m benchmarks.cleanup
	$(BIN)/python -m benchmarks.copies
	$(BIN)/python -m benchmarks.bucket_commands
	$(BIN)/python -m benchmarks.digest
	$(BIN)/python -m benchmarks.prefect
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.partitions
	$(BIN)/python -m benchmarks.mirrors

soak: .venv/dev
	@deployments/test-servers.sh
	$(PYTEST) -m "soak or hypothesis" --hypothesis-profile random \
		--numprocesses 2 --dist loadgroup --no-loadscope-reorder
	$(BIN)/python -m tests.soak
