# Everything runs in .venv, which is created when first needed. Variables:
#   PYTHON=python3.13            the Python that .venv is created with
#   ARGS="-k approval"           arguments for pytest: make tests ARGS="tests/runtime/test_tools.py -n0"
#   CONSTRAINTS=.ci/lowest.txt   versions that pip must install

PYTHON ?= python3
# Three workers for two cores, because some tests wait for terminals, servers and other processes.
JOBS ?= 3
ARGS ?=
CONSTRAINTS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test quick slow tests coverage lint style mypy pyright bench bench-scale soak servers diagrams docs build clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.cli  ## Watch a complete run; needs no API key
	$(BIN)/agentfsm demo

test: lint quick  ## Check style and types, and run the quick tests

quick: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not soak and not servers" $(ARGS)

slow: .venv/.dev  ## Run the tests that take longer than a second each
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not soak and not servers" $(ARGS)

tests: .venv/.dev  ## Run quick and slow tests, or some: make tests ARGS="-k approval"
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

coverage: .venv/.dev  ## Run all tests and report coverage (slower)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal; code=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report; exit $$code

lint: .venv/.dev  ## Check style and types
	@$(MAKE) --no-print-directory -j $(JOBS) style mypy pyright

style: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: .venv/.dev
	$(BIN)/mypy

pyright: .venv/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

bench-scale: .venv/.dev  ## Measure many workers on one server, killed at random; SCALE="--runs 100 --kills 2" for less, without pictures
	$(BIN)/python -m tests.benchmarks.scale_benchmark $(or $(SCALE),--plots docs)

bench: .venv/.dev  ## Measure speed; fails if a bound is missed
	@code=0; for benchmark in streaming_benchmark journal_benchmark listing_benchmark viewer_benchmark "loop_benchmark --check"; do \
	$(BIN)/python -m tests.benchmarks.$$benchmark || code=1; done; exit $$code

soak: .venv/.dev  ## Run the long fault-injection tests
	$(BIN)/python -m pytest -n $(JOBS) -m soak

servers: .venv/.dev  ## Run the tests against servers of others that are large or must be built
	$(BIN)/python -m pytest -n 0 -rs -m servers

diagrams: .venv/.cli  ## Update diagrams/ and the table of the README
	$(BIN)/agentfsm diagram --output diagrams/
	$(BIN)/python -m tests.helpers.generated_docs

docs: .venv/.docs  ## Build the site into build/docs/; fails on a broken link
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto --builder html docs build/docs
	@echo "open build/docs/index.html"

build: .venv/.dev  ## Build the wheel and the sdist into dist/
	$(BIN)/python -m hatchling build

clean:  ## Remove everything that was generated
	rm -rf .venv build dist demo-out node_modules .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentfsm needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/.cli: .venv/bin/python pyproject.toml
	$(PIP) install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[cli]'
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml
	$(PIP) install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[dev]'
	@touch .venv/.cli $@

.venv/.docs: .venv/.dev
	$(PIP) install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[docs]'
	@touch $@
