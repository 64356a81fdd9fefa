# make parity   install into .venv, then run the main job:  make parity ARGS="--ranks 3 --model gpt-debug"
# make test     the same set-up, then the tests:             make test ARGS=parity_tests/test_plan.py
# make fuzz     random jobs on every engine, for minutes:    make fuzz ARGS="--minutes 30 --seed 7"
# make check    ruff and mypy
# make clean    remove .venv and caches; runs/ stays
#
# Another Python or compiler: make PYTHON=/path/to/python3.12, or set CXX in the environment.

SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: parity test fuzz check clean compiler

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= dev
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11 python
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Inductor compiles with C++; another backend does without.
parity: $(if $(findstring --backend,$(ARGS)),,compiler) $(STAMP)
	@$(BIN)/fsdp-parity compare $(ARGS)

test: compiler $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

fuzz: compiler $(STAMP)
	@$(BIN)/python -m parity_tests.fuzz $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	@rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python is tried by running it, since a shim on PATH may stand for a version that is not installed. One that has
# the headers which Inductor compiles against goes before one that has not.
$(STAMP): pyproject.toml constraints.txt
	@works() { "$$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1; }
	has_venv() { "$$1" -c "import venv, ensurepip" >/dev/null 2>&1; }
	has_headers() { "$$1" -c "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')" >/dev/null 2>&1; }
	new_enough= usable= best=
	for candidate in $(PYTHON); do
		works "$$candidate" || continue
		new_enough="$${new_enough:-$$candidate}"
		has_venv "$$candidate" || continue
		usable="$${usable:-$$candidate}"
		has_headers "$$candidate" || continue
		best="$$candidate"
		break
	done
	chosen="$${best:-$$usable}"
	if [ -z "$$new_enough" ]; then
		echo "make: needs Python 3.11 or newer, found none among: $(PYTHON); install one, or say make PYTHON=/path/to/python3" >&2
		exit 2
	elif [ -z "$$chosen" ]; then
		echo "make: $$new_enough lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv), or say make PYTHON=/path/to/python3" >&2
		exit 2
	fi
	"$(BIN)/python" -c "" >/dev/null 2>&1 || "$$chosen" -m venv --clear $(VENV)
	echo "make: installing into $(VENV) with $$($(BIN)/python --version)" >&2
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

compiler:
	@cxx="$${CXX:-g++}"
	"$$cxx" --version >/dev/null 2>&1 && exit 0
	echo "make: needs a C++ compiler, cannot run $$cxx; install one (Debian, Ubuntu: apt install g++) or set CXX; make parity ARGS=\"--backend aot_eager\" does without" >&2
	exit 2
