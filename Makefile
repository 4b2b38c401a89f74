# Everything runs in .venv, which `make install` fills.
PYTHON ?= python3
BIN := .venv/bin

# The tests that need a GPU, in parts of at most five minutes each.
gpu_kernels := tests/gpu/test_kernel_on_gpu.py tests/gpu/test_export_on_gpu.py tests/gpu/test_turns_on_gpu.py
gpu_numbers := tests/gpu/test_simulator_on_gpu.py tests/gpu/test_tf32_on_gpu.py tests/gpu/test_fp16_on_gpu.py
gpu_large := tests/gpu/test_large_on_gpu.py tests/gpu/test_batch_on_gpu.py
gpu_sanitizer := tests/gpu/test_sanitizer.py
gpu_worker := tests/gpu/test_gpu_worker.py
gpu_tuner := tests/gpu/test_tuner_on_gpu.py
gpu_docs := tests/gpu/test_docs_on_gpu.py
gpu_torch := tests/gpu/test_captures_on_gpu.py tests/gpu/test_torch_on_gpu.py tests/gpu/test_leaks_on_gpu.py tests/gpu/test_examples_on_gpu.py
gpu_reports := tests/gpu/test_bench_on_gpu.py tests/gpu/test_ladder_on_gpu.py
GPU_PARTS := gpu-kernels gpu-numbers gpu-large gpu-sanitizer gpu-worker gpu-tuner gpu-docs gpu-torch gpu-reports

.PHONY: help install fmt lint type test golden gpu check $(GPU_PARTS)

help:  ## list what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10
	@echo 'parts of gpu: $(GPU_PARTS)'

install: .venv/installed  ## make .venv with the package, editable, and the development tools

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

fmt: install  ## format the code
	$(BIN)/ruff format autotune tests examples
	$(BIN)/ruff check --fix autotune tests examples

lint: install  ## style and mistakes
	$(BIN)/ruff format --check autotune tests examples
	$(BIN)/ruff check autotune tests examples

type: install  ## types
	$(BIN)/mypy

test: install  ## all tests that need no GPU
	$(BIN)/pytest

golden: install  ## rewrite the rendered kernels the tests compare with
	$(BIN)/pytest tests/test_goldens.py tests/test_parts.py --update-golden

gpu: $(GPU_PARTS)  ## the tests that need a GPU, part by part; a skip is a failure

$(GPU_PARTS): gpu-%: install
	$(BIN)/pytest $(gpu_$*) --require-gpu

check: lint type test  ## what must pass before a commit
