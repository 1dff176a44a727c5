# Every target works as the first command in a fresh clone: it makes the virtual
# environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python -m
# Further flags, for example: make train ARGS='--steps 20 --optimizer adamw'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)

train: $(VENV)/.test ## Train a small GPT-2 with MERIT, in about five minutes.
	$(RUN) examples.gpt2.train $(ARGS)

test: $(VENV)/.test ## Run the tests, in under ten minutes.
	$(RUN) pytest -n 2 $(ARGS)

test-all: $(VENV)/.test ## Run the tests, the slow ones too.
	$(RUN) pytest -n 2 -m '' $(ARGS)

lint: $(VENV)/.dev ## Check format, style and types.
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) mypy

# $(VENV)/.test and $(VENV)/.dev mark that the extra of that name is installed.
$(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...'; exit 1; }
	@echo 'Installing into $(VENV), which takes a few minutes.'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[$*]'
	@touch $@
