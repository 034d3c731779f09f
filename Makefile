# Everything runs in .venv, which the first command makes; nothing is installed anywhere else.
SHELL := /bin/bash
PYTHON ?= python3
PY := .venv/bin/python
TORCH ?= torch==2.13.0
CACHE := .build/megatron
RELEASES := 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2

export VIME_OPTIM_CACHE_DIR := $(CURDIR)/$(CACHE)
export OMP_NUM_THREADS := 1
# Compiled files are kept: megatron-core is imported by hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

# Groups of tests that run at the same time; those of one release share its imported megatron-core.
JOBS ?= 2
PYTEST := -m pytest -n $(JOBS)

.PHONY: demo test test-ci test-all clients lint types matrix mutants coverage docs patches dist docs-shots bench clean setup megatron

# The main job: train with PAO and CPU offload, save, resume in fresh ranks, compare every bit;
# then the same job on the untouched megatron-core, which must fail.
demo: .venv/.setup
	$(PY) -m tests.demo

IN_CI := not matrix and not gpu and not clients

# What every change needs, in minutes.
test: .venv/.setup megatron
	$(PY) $(PYTEST) -m "$(IN_CI) and not ci" $(ARGS)

# That, and what tests/conftest.py and the resume matrix leave to CI.
test-ci: .venv/.setup megatron
	$(PY) $(PYTEST) -m "$(IN_CI)" $(ARGS)

# The real pretrain_gpt.py with install(), resumed and compared (tests/clients): every case on every
# Megatron-LM tree; `make test-ci` runs a spread of them.
clients: .venv/.setup
	$(PY) $(PYTEST) tests/clients $(ARGS)

# Every test but those that need a GPU, the resume matrix included: hours on two cores.
test-all: .venv/.setup megatron
	$(PY) $(PYTEST) -m "not gpu" $(ARGS)

# Lines of the package that `make test-ci` runs, in ranks and writers too; below 90% of fixes/,
# reshard/ and files/ it fails.
COVERAGE := .build/coverage
coverage: .venv/.setup megatron
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	$(PY) -m coverage run $(PYTEST) -m "$(IN_CI)" $(ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report
	$(PY) -m coverage report --fail-under 90 \
	  --include 'vime_optim/fixes/*,vime_optim/reshard/*,vime_optim/files/*'

# The whole resume matrix: hours on two cores. ARGS="-k 0.16.1" runs a part of it, and
# ARGS='-m "not matrix"' what CI runs. Results make docs/matrix.md.
RESULTS := .build/matrix.jsonl
matrix: .venv/.setup megatron
	rm -f $(RESULTS)
	VIME_OPTIM_MATRIX_RESULTS=$(CURDIR)/$(RESULTS) \
	  $(PY) -m pytest tests/test_resume_matrix.py $(ARGS); status=$$?; \
	  $(PY) -m docs.make_matrix $(RESULTS) && exit $$status

# Small changes to the package, one at a time (tests/mutants): a test must notice each. Some minutes;
# ARGS="-k reshard" tries a part.
mutants: .venv/.setup megatron
	$(PY) -m tests.mutants --jobs $(JOBS) $(ARGS)

# patches/<release>/*.patch from patches/src and the releases' wheels.
patches: .venv/.setup megatron
	$(PY) -m patches.generate

lint: .venv/.lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

types: .venv/.lint
	.venv/bin/mypy

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	$(PY) -m docs.check

# Pictures of six pages at two widths, in .build/shots; needs Debian's chromium.
docs-shots: docs
	$(PY) -m docs.shots .build/shots

# Wheel and sdist in dist/, checked and installed in a clean environment. REPOSITORY=https://... makes
# the README's links absolute, as a release needs them.
dist: .venv/.package megatron
	VIME_OPTIM_REPOSITORY=$(REPOSITORY) .ci/package dist

bench: .venv/.setup
	$(PY) -m benchmarks $(ARGS)

setup: .venv/.setup

megatron: $(RELEASES:%=$(CACHE)/%/.fetched)

$(CACHE)/%/.fetched: | .venv/.setup
	$(PY) -c 'from vime_optim.tools.megatron_source import fetch; print(fetch("$*"))'
	touch $@

.venv/.python:
	$(PYTHON) -m venv .venv
	touch $@

# Of torch's files most are never imported: to compile them all would take half of the set-up.
.venv/.setup: pyproject.toml .venv/.python
	.venv/bin/pip install --quiet --no-compile --disable-pip-version-check $(TORCH) -e '.[test,clients,ray,bench]'
	touch $@

.venv/.lint .venv/.docs .venv/.package: .venv/.%: .venv/.setup
	.venv/bin/pip install --quiet --no-compile --disable-pip-version-check -e '.[$*]'
	touch $@

clean:
	rm -rf .build dist .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis site *.egg-info
