# Needs Python >= 3.11, make and git; everything else is installed into $(VENV).
PYTHON ?= python3
VENV   ?= .venv
# Installed first and by itself: from the open range in pyproject.toml pip may take another build.
TORCH  ?= torch==2.13.0
# 5.16 is the lowest version that the adapter supports.
TRANSFORMERS ?= transformers>=5.16,<6
MAMBA  ?= mamba-ssm==2.3.2.post1
ARGS   ?=

# Absolute, because `build` runs it from another folder.
ENV_PYTHON := $(abspath $(VENV))/bin/python
# glibc gives freed blocks of some megabytes back to the system at once and takes them again, page by
# page, at the next step; this keeps them. Without glibc it has no effect.
KEEP_PAGES := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=33554432
STAMP      := $(VENV)/installed
WHEEL_ENV  := build/wheel-env
CONTRACTS_ENV    := build/contracts-env
CONTRACTS_PYTHON := $(CONTRACTS_ENV)/bin/python

# Python compiles what it imports; pip would compile all of torch, in every environment. What comes
# with torchdeq is compiled: the warnings that its syntax causes would be errors in the tests.
PIP_OPTIONS   := --quiet
NO_COMPILE    := --quiet --no-compile

# For the same reason Python must keep what it has compiled; it would compile torch at every start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# `check` ends with the tests, so that their summary is the last thing to be read.
.NOTPARALLEL:
.PHONY: help env a5 copy lm bench experiments docs test fuzz contracts lint types check build wheel clean

help:
	@echo "make a5      train on the A5 word problem        (options: make a5 ARGS=\"--seed 1\")"
	@echo "make copy    train on copying                    (options: as above)"
	@echo "make lm      train a language model of bytes     (options: as above)"
	@echo "make bench   times of the layers, on a GPU       (options: make bench ARGS=--quick)"
	@echo "make experiments  list the experiments, their commands and their run times"
	@echo "make docs    reference pages in build/docs, README first"
	@echo "make test    run the tests                       (options: make test ARGS=\"-m 'not slow'\")"
	@echo "make fuzz    thousands of random cases           (FUZZ_CASES=200, of each law)"
	@echo "make contracts  test the adapters against the real packages, none skipped"
	@echo "make check   lint, types, build, test"
	@echo "make lint    ruff check, ruff format --check, and the budget of lines"
	@echo "make types   mypy --strict over the library, tests and examples"
	@echo "make build   sdist and wheel in dist/, then the wheel in an empty environment"
	@echo "make env     the environment only                (PYTHON=, VENV=, TORCH=torch==2.11.0)"
	@echo "make clean   remove build products, keep $(VENV) and runs/"

env: $(STAMP)

$(STAMP): pyproject.toml
	@echo "== env: $(VENV) with $(TORCH), a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: needs Python >= 3.11, found $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	test -x $(ENV_PYTHON) || $(PYTHON) -m venv $(VENV)
	$(ENV_PYTHON) -m pip install $(NO_COMPILE) "$(TORCH)"
	$(ENV_PYTHON) -m pip install $(PIP_OPTIONS) --editable ".[dev]"
	@touch $@

a5: $(STAMP)
	$(KEEP_PAGES) $(ENV_PYTHON) examples/train_a5.py $(ARGS)

copy: $(STAMP)
	$(KEEP_PAGES) $(ENV_PYTHON) examples/train_copy.py $(ARGS)

lm: $(STAMP)
	$(KEEP_PAGES) $(ENV_PYTHON) examples/train_lm.py $(ARGS)

bench: $(STAMP)
	$(ENV_PYTHON) examples/benchmarks/bench.py --speed examples/results/speed.json $(ARGS)

experiments: $(STAMP)
	$(ENV_PYTHON) examples/research/experiment.py $(ARGS)

docs: $(STAMP)
	@echo "== docs: build/docs/index.html"
	$(ENV_PYTHON) -P -W error docs/reference.py build/docs

# A worker without tests takes some of the other's, which may have been given all of the long ones.
PROCESSES := -n 2 --dist worksteal

# -P keeps the repository root, and with it `kernels` and `solvers`, off sys.path.
# A process either interprets all Triton kernels or compiles them.
test: $(STAMP)
	@echo "== test: Triton kernels, interpreted"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(ENV_PYTHON) -P -m pytest $(PROCESSES) -q -m interpreter
	@echo "== test"
	OMP_NUM_THREADS=1 $(ENV_PYTHON) -P -m pytest $(PROCESSES) $(ARGS)

FUZZ_CASES ?= 200
fuzz: $(STAMP)
	@echo "== fuzz: $(FUZZ_CASES) cases of each law"
	OMP_NUM_THREADS=1 FUZZ_CASES=$(FUZZ_CASES) $(ENV_PYTHON) -P -m pytest -n 2 -q -m fuzz $(ARGS)

# The packages are installed beside those of $(VENV), which stays as it is. A machine without CUDA
# has no compiler for mamba-ssm's kernels; its Python code is what is tested there.
$(CONTRACTS_ENV)/installed: $(STAMP)
	@echo "== contracts: $(CONTRACTS_ENV), a minute"
	rm -rf $(CONTRACTS_ENV)
	$(ENV_PYTHON) -m venv $(CONTRACTS_ENV)
	$(ENV_PYTHON) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(CONTRACTS_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(CONTRACTS_PYTHON) -m pip install $(NO_COMPILE) "$(TRANSFORMERS)" --editable ".[contracts]"
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(CONTRACTS_PYTHON) -m pip install $(NO_COMPILE) \
	    --no-build-isolation --no-deps "$(MAMBA)"
	@touch $@

contracts: $(CONTRACTS_ENV)/installed
	@echo "== contracts"
	OMP_NUM_THREADS=1 BEDOUIN_CONTRACTS=1 $(CONTRACTS_PYTHON) -P -m pytest $(PROCESSES) -q \
	    tests/contracts tests/integrations
	OMP_NUM_THREADS=1 BEDOUIN_CONTRACTS=1 TRITON_INTERPRET=1 $(CONTRACTS_PYTHON) -P -m pytest -q \
	    -m interpreter tests/integrations

lint: $(STAMP)
	@echo "== lint"
	$(ENV_PYTHON) -m ruff check
	$(ENV_PYTHON) -m ruff format --check
	$(ENV_PYTHON) .ci/budget.py

# Type checkers do not follow the import hook of an editable install, but they do follow links.
types: $(STAMP)
	@echo "== types"
	rm -rf build/tree && mkdir -p build/tree/bedouin
	ln -s $(CURDIR)/src/bedouin/* $(CURDIR)/kernels $(CURDIR)/solvers build/tree/bedouin/
	$(ENV_PYTHON) -P -m mypy

build: $(STAMP)
	@echo "== build"
	rm -rf dist $(WHEEL_ENV)
	$(ENV_PYTHON) -P -m build --quiet --outdir dist
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_ENV)/bin/python -m pip install $(NO_COMPILE) "$(TORCH)"
	$(WHEEL_ENV)/bin/python -m pip install $(PIP_OPTIONS) "$(TORCH)" dist/*.whl
	cd $(WHEEL_ENV) && bin/python -I -W error $(CURDIR)/tests/smoke_wheel.py

wheel: build

check: lint types build test

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src kernels solvers tests examples -name __pycache__ -prune -exec rm -rf {} +
