# `make help` lists the targets. PYTHON chooses the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python -m blockshock_lib
# Passed on to the run, e.g. make phase1 ARGS="--hardware cuda --set sweep.n=[4096,8192]"
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup phase0 phase1 test test-gpu nbval notebooks lint lab list clean

help: ## list every target with a line each
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## make the virtual environment, pinned by constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Block-Shock needs Python >= 3.11: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

phase0: setup ## phase 0, correctness: prints the verdict, the notebook and its page
	@$(RUN) run phase0 $(ARGS)

phase1: setup ## phase 1, forward speed: prints the verdicts, the notebook and its page
	@$(RUN) run phase1 $(ARGS)

test: setup lint ## all tests that need no GPU, the committed notebooks among them
	$(VENV)/bin/python -m pytest tests $(ARGS)
	@$(MAKE) --no-print-directory nbval

test-gpu: setup ## the tests that need an NVIDIA GPU
	$(VENV)/bin/python -m pytest tests/gpu -s $(ARGS)

nbval: setup ## re-run the committed notebooks on the CPU and compare their deterministic tables
	@rm -rf .cache/nbval
	CUDA_VISIBLE_DEVICES= BLOCKSHOCK_OUTPUTS=.cache/nbval $(VENV)/bin/python -m pytest --nbval --nbval-cell-timeout 300 -p no:cacheprovider notebooks

notebooks: setup ## re-execute the committed notebooks on the CPU and keep their outputs
	CUDA_VISIBLE_DEVICES= BLOCKSHOCK_OUTPUTS=.cache/notebooks $(VENV)/bin/python -m jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

lint: setup ## ruff
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .

lab: setup ## open JupyterLab on the notebooks
	$(VENV)/bin/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

list: setup ## list the runs under outputs/
	@$(RUN) list

clean: ## remove the virtual environment and caches; outputs stay
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache *.egg-info
