# The commands of this project. Each sets up all it needs by itself: `make demo` is a fine first one.
# PYTHON=python3.12 chooses another interpreter, which has an environment of its own: .venv-3.12.
# WORKERS=0 runs the tests in one process, as a debugger needs; by default there is one more than there are
# cores, since tests wait for servers, mounts and other processes. Two for each core took longer.

PYTHON ?= python3
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
# An interpreter that is not there, or a pyenv shim of a version that is not chosen, is an error of
# tools/setup.sh.
version = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
SUFFIX := $(if $(filter-out python3,$(PYTHON)),-$(version))
BIN := .venv$(SUFFIX)/bin
export PYTHON
# Without compiled files each of the many processes that a test run starts would compile castore for itself,
# and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE
# Nothing here fetches data: a loader that tries to reach a hub is a mistake worth an error.
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench torture strangers clean

help:  ## shows this
	@echo "usage: make COMMAND"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

demo:  ## stores, mounts and reads real files with unmodified loaders (set-up included)
	@tools/setup.sh demo
	@$(BIN)/python -m tools.demo

test: lint  ## the whole test suite, real mounts included (ARGS="-k name" narrows it)
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

lint:  ## ruff, mypy and the import rules
	@tools/setup.sh test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "lint: run '$(BIN)/ruff format .'"; exit 1; }
	@if $(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; \
	then $(BIN)/mypy; \
	else echo "lint: mypy is left out, for it needs the types of torch, which is not installed"; fi
	@$(BIN)/lint-imports --no-logo

docs:  ## builds the site into site/; a dead link or a public name without a docstring fails
	@tools/setup.sh docs
	@# Without --quiet, which would hide the warnings from --strict as well.
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)
	@echo "docs: built site/index.html"

bench:  ## measures castore beside its peers into docs/benchmarks.md (ARGS="--quick" for a glance)
	@tools/setup.sh bench
	@.venv-bench$(SUFFIX)/bin/python -m tools.bench $(ARGS)

torture:  ## tries to break a store for most of an hour, into docs/reliability.md (ARGS="-k soak" for a part)
	@tools/setup.sh torture
	@$(BIN)/python -m tools.torture $(ARGS)

strangers:  ## runs others' tests on castore, from checkouts below REPOS=DIR (ARGS="--json --only diskcache")
	@test -n "$(REPOS)" || { echo "strangers: say where the checkouts lie: make strangers REPOS=DIR"; exit 2; }
	@tools/setup.sh strangers
	@.venv-strangers$(SUFFIX)/bin/python -m tools.strangers "$(REPOS)" $(ARGS)

clean:  ## removes environments, caches and the working folders of demo and bench
	@! grep -qs " $(CURDIR)/" /proc/mounts || \
	{ echo "clean: unmount first: $$(grep -o " $(CURDIR)/[^ ]*" /proc/mounts)"; exit 1; }
	rm -rf .venv .venv-[0-9]* .venv-bench* .venv-strangers* .venv-docs site .demo .bench .strangers \
	.pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find castore fuse tests tools -name __pycache__ -prune -exec rm -rf {} +
