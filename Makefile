# The same commands for people and for machines. Nothing is needed but Python 3.11, make and pip.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
FAST ?=
# A process for each core, with one thread: so twice as fast on two as one process with two threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: help install demo test format bench docs clean

help:           ## say what can be made
	@sed -n 's/^\([a-z]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP)  ## the environment .venv, with everything pinned

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,serve,train,ray,dev]'
	@touch $@

demo: $(STAMP)  ## compress a real model, serve it, ask it; FAST=1 for the short form
	$(BIN)/python examples/demo.py $(if $(FAST),--fast)

test: $(STAMP)  ## style, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(PYTEST)

format: $(STAMP)  ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the figures of docs/performance.md, measured again here
	$(BIN)/python benchmarks/run.py

docs: $(STAMP)  ## the pages, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:          ## everything that was made, save the environment
	rm -rf .demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
