# quickstart: the whole flow on the bundled MNIST sample.   test: the whole suite.   check: lint, types, layers.
# fuzz: damaged files and wrong options for ten minutes, with other cases every day.
# kernels: tests of the GPU kernels on a CPU, in the interpreter of Triton (downloads Triton, 260 MB).
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
# The tests start many processes: bytecode is kept even if the environment says otherwise.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test check fast fuzz kernels clean

quickstart: .venv/.installed
	$(BIN)/smoothcert quickstart

test: .venv/.installed-dev
	$(PYTEST) -n $(WORKERS) --dist worksteal

fast: .venv/.installed-dev
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow"

fuzz: .venv/.installed-dev
	SMOOTHCERT_FUZZ_SECONDS=600 SMOOTHCERT_FUZZ_SEED=$$(date +%Y%m%d) $(PYTEST) tests/fuzz

# The kernels that train ResNets are compiled without Triton: `test` has run them.
kernels: .venv/.installed-dev .venv/.triton
	PYTHONPATH=.venv/triton TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) tests/models/kernels \
		--ignore tests/models/kernels/test_resnet_training.py

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("smoothcert needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# One installation, not two: what it installs includes the other's.
.venv/.installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch .venv/.installed $@

# In a separate folder: torch for CPUs comes without Triton, and the other tests run without it, as users do.
.venv/.triton: .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/triton triton==3.9.0
	touch $@

clean:
	rm -rf .venv build dist
