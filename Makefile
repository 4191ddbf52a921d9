# The commands of this project. Each sets up all it needs by itself: `make demo` is a fine first one.
# PYTHON=python3.12 chooses the interpreter that the environment is made with.
# WORKERS=0 runs the tests in one process, as a debugger needs; by default there is one for each core.

PYTHON ?= python3
WORKERS ?= auto
BIN := .venv/bin
export PYTHON
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
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs:  ## builds the site into site/; a dead link or a public name without a docstring fails
	@tools/setup.sh docs
	@# Without --quiet, which would hide the warnings from --strict as well.
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)
	@echo "docs: built site/index.html"

bench:  ## measures castore beside its peers into docs/benchmarks.md (ARGS="--quick" for a glance)
	@tools/setup.sh bench
	@.venv-bench/bin/python -m tools.bench $(ARGS)

torture:  ## tries to break a store for most of an hour, into docs/reliability.md (ARGS="-k soak" for a part)
	@tools/setup.sh torture
	@$(BIN)/python -m tools.torture $(ARGS)

strangers:  ## runs others' test suites against castore, from checkouts below REPOS=DIR (ARGS="--json --only diskcache")
	@test -n "$(REPOS)" || { echo "strangers: say where the checkouts lie: make strangers REPOS=DIR"; exit 2; }
	@tools/setup.sh strangers
	@.venv-strangers/bin/python -m tools.strangers "$(REPOS)" $(ARGS)

clean:  ## removes environments, caches and the working folders of demo and bench
	@! grep -qs " $(CURDIR)/" /proc/mounts || { echo "clean: unmount first: $$(grep -o " $(CURDIR)/[^ ]*" /proc/mounts)"; exit 1; }
	rm -rf .venv .venv-bench .venv-bench-peers .venv-strangers .venv-docs site .demo .bench .strangers .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find castore fuse tests tools -name __pycache__ -prune -exec rm -rf {} +
