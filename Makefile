# make demo   pack, check, look at and train on the quickstart
# make test   the whole test suite
# make check  formatter, linter, types, import order, and the suite
# make bench  all benchmarks but gpu.py, their figures kept under benchmarks/results/
# make gpu    benchmarks/gpu.py: the kernels and a training step, where there is a GPU (under 8 minutes)
# make peers  exports read back by the code of other trainers, in environments of their own
# Each makes .venv first and installs into it, once per change of pyproject.toml or the C file.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
# The first of these that is Python 3.11 or later.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
# Installed before the rest, so that pip takes a CPU build of it where one is offered.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(shell cat pyproject.toml setup.py packsvc/_native.c Makefile | cksum | cut -d" " -f1)

.PHONY: help demo test check bench bench-full gpu peers lint format clean-venv

help:
	@sed -n 's/^# //p' Makefile | head -7

$(STAMP):
	@test -n "$(PYTHON)" || { echo "packsvc needs Python 3.11 or later; none was found (set PYTHON=...)" >&2; exit 2; }
	@echo "== making $(VENV) with $$($(PYTHON) --version) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq "$(TORCH)" \
		|| echo "   no $(TORCH) here; taking what pyproject.toml admits"
	@$(BIN)/python -m pip install -qq --editable ".[dev]"
	@rm -f $(VENV)/installed-*
	@touch $@

demo: $(STAMP)
	@PATH="$(abspath $(BIN)):$$PATH" bash pipelines/quickstart/demo.sh

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: lint test

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

bench: $(STAMP)
	@mkdir -p benchmarks/results
	@for name in encode exactness pack resume run stream trainers; do \
		echo "== $$name" >&2; \
		$(BIN)/python benchmarks/$$name.py | tee benchmarks/results/$$name.jsonl; \
	done
	for options in "--made" "--tokenizer npm:llama3_1 --made" "--tokenizer tests/data/tokenizers/smollm2"; do \
		$(BIN)/python benchmarks/encode.py $$options | tee -a benchmarks/results/encode.jsonl; \
	done

# The run of a million rows: an hour or more on two cores.
bench-full: $(STAMP)
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/run.py --full | tee benchmarks/results/run-full.jsonl

# Runs with the python there is: on a GPU's machine nothing can be installed. PYTHON=... chooses another.
gpu:
	@mkdir -p benchmarks/results
	$(PYTHON) benchmarks/gpu.py | tee benchmarks/results/gpu.jsonl.new
	@mv benchmarks/results/gpu.jsonl.new benchmarks/results/gpu.jsonl

# Exports read back by Axolotl, torchtune, OLMo-core, Megatron-Bridge and Unsloth, in environments of their own.
peers:
	PYTHON=$(PYTHON) bash benchmarks/peers.sh

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean-venv:
	rm -rf $(VENV)
