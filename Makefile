# `make train` and `make test` set up what they need in .venv. Python 3.10 or newer is required.
PYTHON ?= python3
VENV ?= .venv
ALGO ?= qppo
STEPS ?= $(if $(filter qppo,$(ALGO)),2000000,15000000)
SEED ?= 0
# PyTorch threads of QPPO; the games have as many as there are cores. On an idle machine with two cores, 2 makes 1.4 times the steps
# per second. Next to one busy process it makes 0.4 times those of 1, because the threads wait for each other at every operation
THREADS ?= auto

ifeq ($(filter qppo qa2c,$(ALGO)),)
$(error ALGO is $(ALGO), but must be qppo or qa2c)
endif

BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := setup.py startup tests sb3_qac benchmarks docs/conf.py

.PHONY: help train train-qppo train-qa2c test test-slow test-gpu docs lint type format clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): setup.cfg setup.py pyproject.toml constraints.txt $(wildcard startup/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[tests,docs]"
	touch $@

train: train-$(ALGO)  ## Train QPPO on Pong until it wins by 18 (STEPS=2000000 SEED=0); ALGO=qa2c: QA2C with RL Zoo (STEPS=15000000)

# It stops at an evaluation of 18. An evaluation takes half a minute or more, so there is none until training is near that return. The
# folder has the curve and a video.
PONG := logs/pong-$(STEPS)
train-qppo: $(READY)
	@echo "QPPO learns Pong until 30 whole games return 18 on average. Ten seeds needed 350,000 to 950,000 steps (median 575,000),"
	@echo "20 to 76 minutes (median 36) on one core each of an Intel Xeon; two idle cores of an AMD EPYC took 15."
	@echo "At most $(STEPS) steps. Ctrl-C stops it, the same command resumes: $(PONG)"
	$(BIN)/python -m sb3_qac study pong --algos qppo --seeds $(SEED) --steps $(STEPS) --stop-return 18 --eval-freq 50000 \
		--eval-from 16.5 --dtype bfloat16 --threads $(THREADS) --wandb disabled --output $(PONG)
	$(BIN)/python -m sb3_qac report $(PONG) --goal 18
	$(BIN)/python -m sb3_qac video $(PONG)/qppo_seed-$(SEED) --games 1 --output $(PONG)
	$(BIN)/python -m sb3_qac export $(PONG)/qppo_seed-$(SEED) logs
	@echo "Watch it play: $(BIN)/python -m rl_zoo3.enjoy --algo qppo --env PongNoFrameskip-v4 --folder logs"

train-qa2c: $(READY)
	$(BIN)/python -m rl_zoo3.train --algo qa2c --env PongNoFrameskip-v4 --n-timesteps $(STEPS) --seed $(SEED) --progress \
		--eval-freq 300000 --eval-episodes 30 --n-eval-envs 30 --save-freq 300000 --tensorboard-log logs/tensorboard \
		-params "callback:'sb3_qac.common.callbacks.ExactCheckpointCallback'"

test: $(READY)  ## Run lint, type checks, the documentation build and the test suite
	$(MAKE) --jobs 2 lint type docs
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --durations=15

test-slow: $(READY)  ## Run the slow tests (minutes), including a Ray cluster and a notebook
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[ray,notebook]"
	$(BIN)/python -m pytest -m slow

test-gpu: $(READY)  ## Run the tests of a machine with a GPU
	$(BIN)/python -m pytest -m gpu -W default

docs: $(READY)  ## Build the documentation into docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html -c docs -d docs/_build/doctrees . docs/_build/html
	@echo docs/_build/html/index.html

lint: $(READY)  ## Check with ruff, and the formatting with black
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/black --check $(SOURCES)

type: $(READY)  ## Check the types with mypy
	$(BIN)/mypy

format: $(READY)  ## Sort the imports and format the code
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/black $(SOURCES)

clean:  ## Remove the virtual environment and all build outputs
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache
