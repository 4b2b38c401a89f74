# Everything runs in .venv, which `make install` fills.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install fmt lint type test golden gpu check

help:  ## list what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

install: .venv/installed  ## make .venv with the package, editable, and the development tools

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

fmt: install  ## format the code
	$(BIN)/ruff format autotune tests
	$(BIN)/ruff check --fix autotune tests

lint: install  ## style and mistakes
	$(BIN)/ruff format --check autotune tests
	$(BIN)/ruff check autotune tests

type: install  ## types
	$(BIN)/mypy

test: install  ## all tests that need no GPU
	$(BIN)/pytest

golden: install  ## rewrite the rendered kernels the tests compare with
	$(BIN)/pytest tests/test_goldens.py --update-golden

gpu: install  ## the tests that need a GPU; a skip is a failure
	$(BIN)/pytest tests/gpu --require-gpu

check: lint type test  ## what must pass before a commit
