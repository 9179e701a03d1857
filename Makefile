# `make help` lists the targets. PYTHON chooses the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV   ?= .venv
BLOCKSHOCK := $(VENV)/bin/python -m blockshock_lib
# Passed on to the run, e.g. make phase1 ARGS="--hardware cuda --set sweep.n=[4096,8192]"
ARGS   ?=
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python$(PYTHON),$(PYTHON))
# The run that a target is about: make share RUN=outputs/2026-11-21/101500-linear-phase1-cpu
RUN    ?=
# A folder of wheels to install from, for a machine without internet: make wheelhouse fills it.
WHEELHOUSE ?=

# Files of tests side by side, one more than there are cores as some wait for processes, at most four at once. More
# threads a process would only wait for each other. The order of the files is ours (tests/conftest.py). The hundreds of
# processes that tests start find the library compiled, a second each, also where Python was told to write no bytecode.
# `tests.aloud` says a line every few seconds, from the start on.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -p tests.aloud
SPREAD := --numprocesses=$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
NBVAL  := --nbval --nbval-cell-timeout 1800 -p tests.nbval_runs

# pip is silent for minutes: `aloud` runs a command and says every few seconds how far the environment has come.
EVERY := 8
ALOUD := aloud() { (while sleep $(EVERY) >/dev/null 2>&1 && kill -0 $$$$; do \
	echo "setup goes on: $$(du -sm $(VENV) | cut -f1) MB in $(VENV)"; done) & trap "kill $$!" EXIT; "$$@"; };
PIP := aloud $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable

.DEFAULT_GOAL := help
.PHONY: help setup phase0 phase1 phase2 phase3 attention gpt gallery corpus findings report compare share list lab test test-all test-faults test-browser test-gpu nbval nbval-update lint wheelhouse clean

help: ## list every target with a line each
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## make the virtual environment, pinned by constraints.txt; WHEELHOUSE=folder installs from it alone

$(VENV)/.ready: pyproject.toml constraints.txt
	@! test -L $(VENV) || { echo "$(VENV) is a link, perhaps to another clone's environment: remove it first" >&2; exit 1; }
	$(INTERPRETER) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Block-Shock needs Python >= 3.11: make PYTHON=python3.12 ...")'
ifneq ($(WHEELHOUSE),)
	@$(ALOUD) aloud $(INTERPRETER) -m tools.offline $(WHEELHOUSE) $(VENV)
else
	$(INTERPRETER) -m venv $(VENV)
	@$(ALOUD) $(PIP) '.[workbook,dev]'
	@$(ALOUD) ! $(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' || $(PIP) '.[workbook,dev,cuda]'
endif
	@touch $@

phase0: setup ## phase 0, correctness: prints the verdict, the notebook and its page
	@$(BLOCKSHOCK) run phase0 $(ARGS)

phase1: setup ## phase 1, forward speed: prints the verdicts, the notebook and its page
	@$(BLOCKSHOCK) run phase1 $(ARGS)

phase2: setup ## phase 2, backward with frozen weights: prints the verdict, the notebook and its page
	@$(BLOCKSHOCK) run phase2 $(ARGS)

phase3: setup ## phase 3, training with SGD and AdamW: prints the verdict, the notebook and its page
	@$(BLOCKSHOCK) run phase3 $(ARGS)

attention: setup ## the attention study's phases in a row: every kernel right, its speed on one device, and over ranks
	@$(BLOCKSHOCK) run attention $(ARGS)

gpt: setup ## the gpt study's phases in a row: every schedule right, what it costs in loss, what it saves in time
	@$(BLOCKSHOCK) run gpt $(ARGS)

gallery: setup ## the gallery of sparsity patterns: which pays on this GPU, and what it costs in loss
	@$(BLOCKSHOCK) run gallery $(ARGS)

phase% attention_% gpt_% gallery_%: setup
	@$(BLOCKSHOCK) run $@ $(ARGS)

corpus: setup ## build a text corpus to train on from the installed packages, without a download; or take your shards: ARGS="--data folder"
	@$(BLOCKSHOCK).layers.gpt.corpus $(ARGS)

findings: setup ## weigh all records, the shipped and your own: the linear study's answer page, docs/results, README; measures nothing
	@$(BLOCKSHOCK) findings $(ARGS)
	@$(VENV)/bin/python -m tools.results

report: setup ## draw a run again from its records: RUN=folder or RUN=colleague.zip; measures nothing
	@test -n "$(RUN)" || { echo "make report RUN=folder"; exit 2; }
	@$(BLOCKSHOCK) report $(RUN) $(ARGS)

compare: setup ## compare run B with run A (A=folder B=folder); fails on a regression, so it can guard a change
	@test -n "$(A)" -a -n "$(B)" || { echo "make compare A=folder B=folder"; exit 2; }
	@$(BLOCKSHOCK) compare $(A) $(B) $(if $(ALLOW),--allow $(ALLOW)) $(ARGS)

share: setup ## write outputs/index.html, all runs on one page; with RUN=folder pack that run as a zip
	@$(BLOCKSHOCK) share $(RUN) $(ARGS)

list: setup ## list the runs under outputs/
	@$(BLOCKSHOCK) list $(ARGS)

lab: setup ## open JupyterLab on copies of the notebooks, in outputs/lab; this machine only, with a token
	PYTHONPATH=$(CURDIR) $(VENV)/bin/python -m jupyterlab --ip=127.0.0.1 --LabApp.app_settings_dir=$(CURDIR)/tools/lab \
		--notebook-dir="$$($(VENV)/bin/python -m tools.lab_copies)" $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

test: setup lint ## the quick tests: no GPU, no browser; of each test the first case
	$(PYTEST) tests --ignore=tests/browser -m "not long" $(SPREAD) $(ARGS)

test-all: setup lint ## all tests that need no GPU and no browser: the long ones and the committed notebooks too
	@rm -rf .cache/nbval
	$(PYTEST) tests notebooks --ignore=tests/browser $(NBVAL) $(SPREAD) $(ARGS)

test-faults: setup ## the faults that the workbook must survive, alone
	$(PYTEST) tests/faults $(SPREAD) $(ARGS)

test-browser: $(VENV)/.browser ## the pages and the explore notebook in a headless Chromium, which must be installed
	$(VENV)/bin/python -m pytest tests/browser $(ARGS)

$(VENV)/.browser: $(VENV)/.ready
	@$(ALOUD) $(PIP) '.[workbook,dev,browser]'
	@touch $@

test-gpu: setup ## the tests that need an NVIDIA GPU
	$(VENV)/bin/python -m pytest tests/gpu -s $(ARGS)

nbval: setup ## re-run the committed notebooks on the CPU and compare their deterministic tables
	@rm -rf .cache/nbval
	$(PYTEST) notebooks $(NBVAL) $(SPREAD) $(ARGS)

nbval-update: setup ## re-execute the committed notebooks, show what changed in their tables; COMMIT=1 commits them
	$(VENV)/bin/python -m tools.update_notebooks $(if $(COMMIT),--commit) notebooks/*.ipynb

CODE = benchmarks blockshock_lib examples tests tools
lint: setup ## ruff, which an environment made from a wheelhouse lacks
	@test -e $(VENV)/.offline || $(VENV)/bin/ruff check --quiet $(CODE)
	@test -e $(VENV)/.offline || $(VENV)/bin/ruff format --check --quiet $(CODE)

# The host's PYTHON, a version or the name of an interpreter; what gathers runs here, with or without an environment.
wheelhouse: ## gather wheels for a host without internet: PYTHON=3.12 HAVE=freeze.txt (a pip freeze of the host)
	$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3) -m tools.wheelhouse --python $(PYTHON) $(if $(HAVE),--have $(HAVE)) $(ARGS)

clean: ## remove the virtual environment and caches; outputs stay
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache *.egg-info
