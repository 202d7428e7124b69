# `make` lists the targets. The first run makes .venv with the pinned packages; later runs find it ready.
# To choose the interpreter: make test PYTHON=/path/to/python3.12

QUICKSTART      ?= .venv/bin/evsys run examples/02_quickstart/config.yaml
QUICKSTART_SETS ?= local
DEV_SETS        ?= dev local tinker harbor frontier search plot ray serve dashboard mcp gepa llama_cpp
PYTEST_ARGS     ?= -q -n auto --dist worksteal
PERF            ?= $(sort $(wildcard perf/*.py))
LOCK_FLAGS      ?=

# Tests start hundreds of interpreters; without bytecode each compiles the SDK anew, for half a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart test slow check format lock perf clean dev docs

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

quickstart: ## set up, run the example experiment, print its result
	@requirements/bootstrap.sh $(QUICKSTART_SETS)
	$(QUICKSTART)

test: check ## set up, check, run the tests
	.venv/bin/python -m pytest $(PYTEST_ARGS)

slow: dev ## the tests that take minutes each: real weights, SkyRL's server
	.venv/bin/python -m pytest -v -m slow -o faulthandler_timeout=0

check: dev ## lint, formatting, types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: dev ## put the code into the house format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

dev: ## set up the environment for working on the code
	@requirements/bootstrap.sh $(DEV_SETS)

lock: dev ## resolve pyproject.toml into requirements/*.txt (newer versions: LOCK_FLAGS=--upgrade)
	requirements/lock.sh $(LOCK_FLAGS)

docs: ## build the documentation site into build/site
	@requirements/bootstrap.sh base docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo "docs    build/site/index.html"

perf: dev ## run the speed measurements
	@set -e; for script in $(PERF); do echo "== $$script"; .venv/bin/python $$script; done

clean: ## remove the environment and everything generated
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
