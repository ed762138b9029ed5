# Everything happens in .venv, which is made on first use; all that is needed beforehand is Python 3.11+ and make.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto

# Compiled modules are kept, whoever's environment says otherwise: the tests start a hundred interpreters.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test check wheel-test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## watch memvault work on a sample of memories
	@$(BIN)/memvault demo

test: $(STAMP) ## run the tests (PYTEST_ARGS="-k name" narrows them)
	$(BIN)/pytest $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

wheel-test: $(STAMP) ## build the sdist, the wheel from it, and try that outside the checkout
	@scripts/wheel_test.sh $(BIN)/python

# pip compiles every module it installs; importing the large ones once compiles what is used, in half the time.
$(STAMP): pyproject.toml constraints.txt
	@command -v '$(PYTHON)' >/dev/null \
	  || { echo "memvault needs Python 3.11 or newer: '$(PYTHON)' was not found (try make PYTHON=python3.12)" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "memvault needs Python 3.11 or newer: '$(PYTHON)' is older (try make PYTHON=python3.12)" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "memvault needs Python's venv module: '$(PYTHON)' lacks it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Setting up .venv (a minute or two, once)"
	@'$(PYTHON)' -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,sqlite]'
	@$(BIN)/python -c 'import alembic, chromadb, hypothesis, pytest, sqlmodel, typer, wordllama'
	@touch $@
