# `make demo` and `make test` need Python 3.11 or newer with pip and venv, and nothing else.
# They set up .venv themselves; running a target again starts at once.
# make demo ARGS=--use_fsdp SCRIPT_ARGS="--epochs 1": flags of the launch, and of the example.

PYTHON ?= python3
ARGS ?=
SCRIPT_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
TIMEOUT := $(shell command -v timeout)
# $(call within,SECONDS) bounds a command where the machine has `timeout` (macOS has none; the tests bound themselves).
# In the foreground, or Ctrl-C would not reach the command.
within = $(if $(TIMEOUT),$(TIMEOUT) --foreground --kill-after=10 $(1))
# A folder of tests that is not there yet is no failure; an empty one is.
tests_in = $(if $(wildcard $(1)),$(call within,$(2)) env $(PYTEST) $(1),@echo "$(1): none yet")

.PHONY: demo test check ranks e2e docs soak mutations bench clean

demo: $(VENV)/installed
	$(BIN)/drivetrain launch --cpu --num_processes 2 $(ARGS) examples/language_model.py $(SCRIPT_ARGS)

test: $(VENV)/installed-test
	$(MAKE) check
	$(MAKE) ranks
	$(MAKE) e2e
	$(MAKE) docs

check: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/support/house.py
	$(call tests_in,tests/unit,180)

ranks: $(VENV)/installed-test
	$(call tests_in,tests/ranks,450)

e2e: $(VENV)/installed-test
	$(call tests_in,tests/e2e,400)

docs: $(VENV)/installed-test
	$(call tests_in,tests/docs,180)

soak: $(VENV)/installed-test
	$(PYTEST) -m soak --soak-results=tests/soak-results.md tests

# Two breaks at a time; `make mutations ARGS='--only fsdp'` makes some of them.
mutations: $(VENV)/installed-test
	$(call within,1800) $(BIN)/python tests/mutations/run.py --jobs 2 $(ARGS)

bench: $(VENV)/installed-bench
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is not Python 3.11 or newer"; \
	  echo "  hint: name another one, such as make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch has a line of its own: it is by far the largest, and a failure here is then plainly about torch.
$(VENV)/torch: constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt torch
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt $(VENV)/torch
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt $(VENV)/torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-bench: pyproject.toml constraints.txt $(VENV)/torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[bench]'
	@touch $@ $(VENV)/installed
