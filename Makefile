# `make help` lists the targets. Every target does all of its own set-up.

# Not sh: make 3.81, which macOS has, then runs simple lines itself and doesn't look into the PATH exported below.
SHELL       := /bin/bash
VENV        ?= .venv
PROFILE     ?= tiny
ONLY        ?=
# Not what OMP_NUM_THREADS says, which nproc would report.
JOBS        ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || sysctl -n hw.ncpu)
ALLOW_DIRTY ?=
MISSING     ?=
# An extra package index for pip, for instance the CPU wheels of PyTorch. Empty: the default index alone.
TORCH_INDEX ?=

# One thread a process: the workflow and the tests run several processes instead.
export OMP_NUM_THREADS ?= 1
export JUPYTER_PREFER_ENV_PATH := 1
export PATH := $(abspath $(VENV))/bin:$(PATH)
# This checkout's library, whatever the environment has installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

CHECKED   := unlearnlib tests conftest.py book/_ext
SNAKEMAKE  = snakemake --quiet all --keep-going --rerun-incomplete --rerun-triggers params --cores $(JOBS)
# $(call workflow,targets and configuration,what to do afterwards). One that was killed, not interrupted, leaves its lock.
workflow   = @$(SNAKEMAKE) $(1); status=$$?; $(2) \
	if [ $$status -ne 0 ] && [ -n "$$(ls .snakemake/locks 2>/dev/null)" ]; then \
		echo "The workflow is locked. If no other make is at work in this folder, run: make unlock" >&2; \
	elif [ $$status -ne 0 ]; then \
		echo "Failed, see above; the workflow's own log: $$(ls -t .snakemake/log/* 2>/dev/null | head -1)" >&2; \
	fi; exit $$status
RUNS       = --config profile=$(PROFILE) only='$(ONLY)' $(if $(ALLOW_DIRTY),allow_dirty=1) $(if $(MISSING),missing=1)
SHOW      := if [ -f _build/html/index.html ]; then echo "The book: $(CURDIR)/_build/html/index.html"; fi;

.DEFAULT_GOAL := help
.PHONY: help venv model book html test lint reproduce promote bench clean distclean unlock

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  Variables: PROFILE=$(shell ls profiles | sed -n 's/\.yaml$$//p' | paste -sd '|' -)  ONLY=notebook/run, with * and ?"
	@echo "    MISSING=1  reproduce and promote: only runs that have no committed record yet, to make a long profile in several sittings"
	@echo "    JOBS=$(JOBS)  ALLOW_DIRTY=1  TORCH_INDEX=url"

book: venv model  ## run what is stale of the tiny profile, compare with the committed records, build the book
	$(call workflow,reproduce html,$(SHOW))

html: venv  ## build the pages alone, from the committed notebooks and records
	$(call workflow,html,$(SHOW))

test: venv model lint  ## lint, unit and property tests, nbval over the executed notebooks, checks of the book
	@python -m pytest -n $(JOBS) --dist loadfile --nbval --nbval-current-env tests book/executed

lint: venv  ## ruff alone
	@ruff check $(CHECKED)
	@ruff format --check $(CHECKED)

reproduce: venv model  ## run what is stale of PROFILE (of ONLY) and compare with the committed records
	$(call workflow,reproduce $(RUNS))

promote: venv model  ## run what is stale of PROFILE (of ONLY) and update results/ and book/executed/ where they disagree
	$(call workflow,runs $(RUNS))
	@python -m unlearnlib.runs promote --profile $(PROFILE) --only='$(ONLY)' $(if $(MISSING),--missing)
	@python book/_ext/readme_picture.py

bench: venv model  ## measure and write results/bench/
	@python -m unlearnlib.bench

unlock: venv  ## remove the lock that a killed workflow left
	@snakemake --cores 1 --unlock --keep-going --quiet all

clean:  ## remove all that was built, keeping the environment and downloaded models
	@rm -rf _build .snakemake .pytest_cache .ruff_cache .hypothesis

distclean: clean  ## remove the environment, too
	@rm -rf $(VENV) unlearnlib.egg-info

# The embedded model, fetched once into the cache (UNLEARNLIB_CACHE moves it).
model: venv
	@python -c "from unlearnlib.models import fetch_embedded; fetch_embedded()"

# Installed again when the pins change, by content. An installation that was interrupted has no stamp, so it is done again, and an
# environment whose creation was interrupted has no pip that works, so it is created again.
venv:
	@wanted="$$(cat requirements.lock pyproject.toml | cksum)"; \
	if [ "$$(cat $(VENV)/.installed 2>/dev/null)" = "$$wanted" ]; then exit 0; fi; \
	if [ -L $(VENV) ]; then \
		echo "$(VENV) is a link, so another checkout's environment, and differs from this one's pins: not touched." >&2; \
		echo "Remove the link, or name another folder with VENV=" >&2; exit 1; \
	fi; \
	set -e; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
		for candidate in python3.11 python3; do \
			if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "Python 3.11 is needed, and neither python3.11 nor python3 is one: install it (with its venv module) and try again" >&2; exit 1; \
		fi; \
		echo "creating $(VENV) with $$($$found --version) …"; \
		clear=; if [ -f $(VENV)/pyvenv.cfg ]; then clear=--clear; fi; \
		"$$found" -m venv $$clear $(VENV); \
	fi; \
	pip="$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))"; \
	echo "installing the pinned packages (a minute or two) …"; \
	$$pip "$$(grep '^torch==' requirements.lock)"; \
	$$pip -r requirements.lock; \
	$$pip --no-deps --editable .; \
	echo "$$wanted" > $(VENV)/.installed
