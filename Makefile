# gpustackd. Everything sets up what it needs by itself: Python 3.11+, make and a package index are enough.
SHELL := /bin/sh
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# The first interpreter that is new enough; `make PYTHON=/path/to/python3.13 …` names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
  command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
  && { echo $$p; break; }; done)
# Tests running at once: more than there are cores, since they wait more than they work.
JOBS ?= 3
# More arguments for pytest, such as ARGS='-k embedded -x'.
ARGS ?=
IMAGE ?= gpustackd:dev

.PHONY: help setup demo test check format lint types layers schema docs golden bench chaos image lock clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: ## the environment in .venv (costs nothing when it is in step with the lock)
	@p="$(PYTHON)"; test -n "$$p" || { echo "gpustackd needs Python 3.11 or newer; none was found on PATH (tried python3, python3.11 to python3.14). Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 2; }; \
	"$$p" .ci/bootstrap.py

demo: setup ## the main job on real input, against a PostgreSQL of its own
	@$(BIN)/gpustackd demo

test: setup ## the test suite, against a real PostgreSQL
	@$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

check: setup format lint types layers schema ## format, lint, types, layers, migrations in step with tables

format: setup
	@echo "== format"; $(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --diff --quiet | head -n 60; echo "fix it with: $(BIN)/ruff format" >&2; exit 1; }

lint: setup
	@echo "== lint"; $(BIN)/ruff check --quiet --output-format=concise

types: setup
	@echo "== types"; $(BIN)/mypy

layers: setup
	@echo "== layers"; $(BIN)/lint-imports --no-logo

schema: setup
	@echo "== schema"; $(BIN)/python .ci/schema.py

docs: setup ## bring docs/manual.md up to date with the code
	@$(BIN)/python .ci/manual.py

golden: setup ## write the record of decisions anew (tests/golden), where a change is meant
	@$(BIN)/python -m tests.golden

bench: setup ## measurements, printed as one table; ARGS=--quick for the short form
	@$(BIN)/python -m tests.bench $(ARGS)

chaos: setup ## real processes killed, stopped and restarted; property tests with new seeds and for long
	@$(BIN)/pytest -m chaos -n 0 --timeout 900 $(ARGS)
	@GPUSTACKD_TEST_EXPLORE=20 $(BIN)/pytest -n $(JOBS) --timeout 3600 tests/property tests/unit

image: ## the container image
	docker build --tag $(IMAGE) .

lock: ## resolve the dependencies anew (needs uv); UPGRADE=--upgrade takes the newest
	@command -v uv >/dev/null || { echo "make lock needs uv on PATH (pip install uv)" >&2; exit 2; }
	uv pip compile $(LOCK) $(UPGRADE) pyproject.toml --extra uvloop --output-file requirements.lock
	uv pip compile $(LOCK) $(UPGRADE) pyproject.toml --all-extras --group dev --constraint requirements.lock --output-file requirements-dev.lock
# Names, versions and hashes alone: no index, no download address.
LOCK := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
  --no-emit-find-links --custom-compile-command 'make lock'

clean: ## remove the environment, caches and whatever the commands left behind
	rm -rf .venv .venv.lock build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .demo .bench .pgdata
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
