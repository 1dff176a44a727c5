# Every target works as the first command in a fresh clone: it makes the virtual
# environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
# Versions of the dependencies; /dev/null takes the newest.
CONSTRAINTS ?= constraints.txt
RUN := $(VENV)/bin/python -m
# Further flags, for example: make train ARGS='--steps 20 --optimizer adamw'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-newest lint

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)

train: $(VENV)/.test ## Train a small GPT-2 with MERIT, in about five minutes.
	$(RUN) examples.gpt2.train $(ARGS)

test: $(VENV)/.test ## Run the tests, in under ten minutes.
	$(RUN) pytest -n 2 $(ARGS)

test-all: $(VENV)/.test ## Run the tests, the slow ones too.
	$(RUN) pytest -n 2 -m '' $(ARGS)

test-newest: ## Run the tests with the newest jax that Python 3.12 gets.
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=/dev/null PYTHON=python3.12

lint: $(VENV)/.dev ## Check format, style and types.
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) mypy

# $(VENV)/.test and $(VENV)/.dev mark that the extra of that name is installed.
$(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...'; exit 1; }
	@echo 'Installing into $(VENV), which takes a few minutes.'
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check \
	  --constraint $(CONSTRAINTS) --editable '.[$*]'
	@touch $@
