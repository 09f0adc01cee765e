# make demo   the main job on a real model      make test    every test
# make up     the stack, until Ctrl-C           make check   style, types, rooms
PYTHON ?= python3
VENV ?= .venv
# On Linux, PyPI's torch brings CUDA along. For the CPU build alone:
#   make setup PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
BIN := $(VENV)/bin

.PHONY: setup demo up bench bench-bridges check format test test-faults test-faults-long clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "jitney needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/jitney demo

up: setup
	@$(BIN)/jitney up

# Every figure of ops/bench/RESULTS.md, in hours; BENCH_FLAGS=--quick for a first impression.
BENCH_FLAGS ?=
bench: setup
	@$(BIN)/python -m ops.bench.run_all --write ops/bench/RESULTS.md $(BENCH_FLAGS)

# One load through RQ and Celery, four ways: five minutes; BENCH_FLAGS=--quick for one.
# celery-batches asks for an older Celery than the one here, and runs with it.
bench-bridges: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps celery-batches==0.11
	@$(BIN)/python -m ops.bench.bridges $(BENCH_FLAGS)

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/python -m pytest

# The nemesis suite: real processes, killed, stopped, cut off. Short: one seed a row. Long: five, and a real model.
# The timeouts find what hangs; on a busy machine a row may well take ten times as long as on an idle one.
test-faults: setup
	JITNEY_FAULT_SEEDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults --timeout 900

test-faults-long: setup
	JITNEY_FAULT_SEEDS=5 JITNEY_FAULT_BLOWS=40 JITNEY_FAULT_MODEL=smollm2-135m-instruct OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/faults --timeout 1800

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
