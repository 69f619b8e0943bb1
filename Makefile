# Sets up .venv and runs the project's short commands. Needs Python 3.11+, git and make; no root, no GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test check docs fuzz soak lowest wheel clean

help: ## Show these targets
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "make %-8s %s\n", $$1, $$2}'

demo: $(VENV)/core.stamp ## Plan, predict and run the main example on this machine
	@$(BIN)/shardroute demo

test: $(VENV)/test.stamp ## The tests, and beside them lint, types and import contracts
	@$(MAKE) --no-print-directory check & checks=$$!; \
	  $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	  wait $$checks && exit $$tests

check: $(VENV)/test.stamp ## Lint, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo

docs: $(VENV)/docs.stamp ## Build the site of docs/ into build/site; broken links and stale tables fail
	@$(BIN)/python tools/docs_tables.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is build/site/index.html; its search works when served: python -m http.server -d build/site"

fuzz: $(VENV)/test.stamp ## Give every reader inputs that are nearly right, for two minutes; needs no network
	@$(BIN)/python tools/fuzz.py --seconds 120

soak: $(VENV)/test.stamp ## Move the same weights a thousand times; nothing may grow. With torch over gloo too
	@$(BIN)/python tools/soak.py --refits 1000 --ring 200 \
	  $$($(BIN)/python -c 'import torch' 2>/dev/null || echo --transport processes)

lowest: $(VENV)/core.stamp ## Test with the oldest dependencies that pyproject.toml allows, in build/lowest
	@$(PIP) install --quiet uv
	@$(BIN)/python tools/lowest.py -- -n 2 --dist loadfile

wheel: $(VENV)/test.stamp ## Build the wheel twice; both must be the same, byte for byte
	@$(BIN)/python tools/supply.py --wheel

clean: ## Remove .venv and all that was built or cached
	rm -rf $(VENV) build dist *.egg-info out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find topologies planner executors tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>&1) || found="not on this machine"; \
	  echo "shardroute needs Python 3.11 or newer; '$(PYTHON)' is $$found." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The demo needs the core install only, so test tools have a stamp of their own.
$(VENV)/core.stamp: $(VENV)/python.stamp pyproject.toml
	@echo "Installing shardroute and what it needs into $(VENV)"
	@$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/core.stamp
	@echo "Installing the test tools into $(VENV)"
	@$(PIP) install --quiet --editable '.[test]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/core.stamp
	@echo "Installing what builds the site into $(VENV)"
	@$(PIP) install --quiet --editable '.[docs]'
	@touch $@
