# Every target works as the first command in a fresh clone: it makes the virtual
# environment and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
# Versions of the dependencies; /dev/null takes the newest.
CONSTRAINTS ?= constraints.txt
# What `make test` installs: `test`, or `library` for the library's tests alone.
GROUP ?= test
# jax 0.12 and later need Python 3.12.
NEWEST_PYTHON ?= python3.12
RUN := $(VENV)/bin/python -m
# Further flags, for example: make train ARGS='--steps 20 --optimizer adamw'
ARGS ?=
# The library, and of the rest what takes seconds. (The sdist has some.)
TESTS ?= tests/gpt2/train_test.py tests/merit_optax/mesh_test.py \
  merit_optax tests/merit_optax tests/release \
  tests/docs/references_test.py tests/notebooks_test.py \
  tests/gpt2/config_test.py
# What depends on the versions of jax, optax, flax and orbax.
LIBRARY_TESTS := tests/conformance merit_optax tests/merit_optax
TRAINER_TESTS := tests/gpt2/train_test.py tests/gpt2/checkpoints_test.py
# Most of XLA's optimizations take longer than they save in tests. Those that
# look at what is compiled have them all, and so has `make test-newest`.
QUICK ?= JAX_DISABLE_MOST_OPTIMIZATIONS=1
FEW_EXAMPLES := --hypothesis-profile=few
# Tests of a file share what they compile, and the runs that they look at. Left to
# itself, xdist would begin with files of many tests, which are quick ones.
PYTEST := $(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder
# Slow tests that start several processes and want all cores for themselves:
# devices that wait for each other give up when they are starved.
ALONE := tests/conformance tests/gpt2/launch_test.py \
  tests/gpt2/processes_test.py tests/gpt2/loop_test.py

# Frameworks that examples/clients has a recipe for.
CLIENTS ?= maxtext kauldron levanter easydel

.DEFAULT_GOAL := help
# Keep the marks of the clients' environments.
.SECONDARY:
.PHONY: help train test test-all test-rest test-oldest test-newest \
  test-slow test-clients lint docs notebooks package

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s  %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)

train: $(VENV)/.test ## Train a small GPT-2 with MERIT, in about three minutes.
	$(RUN) examples.gpt2.train $(ARGS)

test: $(VENV)/.$(GROUP) ## Run the quick tests, in about five CPU minutes.
	$(QUICK) $(PYTEST) $(wildcard $(TESTS)) $(ARGS)

test-all: test test-rest test-slow ## Run all tests, with one set of versions.

test-rest: $(VENV)/.dev ## Run the tests that are neither quick nor slow.
	$(QUICK) $(PYTEST) $(TESTS:%=--ignore=%) $(ARGS)

test-slow: $(VENV)/.dev ## Run the slow tests.
	$(PYTEST) -m slow $(ALONE:%=--ignore=%) $(ARGS)
	$(RUN) pytest -m slow $(ALONE) $(ARGS)

test-oldest: ## Test the library and the trainer with the oldest versions of each.
	$(MAKE) test VENV=$(VENV)-oldest CONSTRAINTS=constraints-oldest.txt \
	  GROUP=library TESTS='$(LIBRARY_TESTS)' ARGS='$(FEW_EXAMPLES) $(ARGS)'
	$(MAKE) test VENV=$(VENV)-oldest-examples \
	  CONSTRAINTS=constraints-oldest-examples.txt TESTS='$(TRAINER_TESTS)'

test-newest: ## Test both with the newest versions (Python 3.12).
	$(MAKE) test VENV=$(VENV)-newest CONSTRAINTS=/dev/null \
	  PYTHON=$(NEWEST_PYTHON) QUICK= \
	  TESTS='$(TRAINER_TESTS) $(LIBRARY_TESTS)' \
	  ARGS='$(FEW_EXAMPLES) $(ARGS)'

test-clients: ## Train with MaxText, Kauldron, Levanter and EasyDeL (Python 3.12).
	$(MAKE) --keep-going $(CLIENTS:%=test-client-%)

test-client-%: $(VENV)-clients/%/.installed
	JAX_PLATFORMS=cpu $(VENV)-clients/$*/bin/python -m pytest -rs \
	  --confcutdir=tests/clients tests/clients/$*_test.py $(ARGS)

# Each has an environment of its own, since their versions exclude each other.
# The files name all packages; pip would take hours to find the same ones.
$(VENV)-clients/%/.installed: examples/clients/%.txt
	@echo 'Installing $* into $(VENV)-clients/$*, up to 7 GB.'
	$(NEWEST_PYTHON) -m venv $(VENV)-clients/$*
	$(VENV)-clients/$*/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-deps --requirement $< --editable .
	@touch $@

lint: $(VENV)/.dev ## Check format, style, types, and what GitHub reads.
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) mypy
	$(VENV)/bin/shellcheck examples/launch/*.sh
	$(RUN) check_jsonschema .github/workflows/*.yml \
	  --builtin-schema vendor.github-workflows
	$(RUN) check_jsonschema .github/ISSUE_TEMPLATE/*.yml \
	  --builtin-schema vendor.github-issue-forms
	$(RUN) check_jsonschema .github/dependabot.yml \
	  --builtin-schema vendor.dependabot
	$(RUN) check_jsonschema CITATION.cff \
	  --builtin-schema vendor.citation-file-format

notebooks: $(VENV)/.test ## Run the notebooks and keep their outputs.
	$(VENV)/bin/python notebooks/run.py $(ARGS)

docs: $(VENV)/.docs ## Build the documentation; it fails on any warning.
	$(RUN) sphinx -n -W --keep-going -d docs/_build/doctrees $(ARGS) \
	  docs docs/_build/html
	@echo 'Open docs/_build/html/index.html in a browser.'

package: $(VENV)/.package ## Build wheel and sdist into dist/, and check them.
	rm -rf dist
	$(RUN) build
	$(RUN) twine check --strict dist/*

# $(VENV)/.test and so on mark that the dependency group of that name is installed,
# which the pip of Python 3.11 does not know yet. Without --no-compile, pip would
# compile what is never imported too.
$(VENV)/.%: pyproject.toml $(wildcard constraints*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...'; exit 1; }
	@echo 'Installing into $(VENV), which takes a few minutes.'
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(RUN) pip install --quiet --no-compile --disable-pip-version-check \
	  --constraint $(CONSTRAINTS) --group $* --editable .
	@touch $@
