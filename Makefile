# make demo   trains a streaming adapter on the embedded world, two processes, no GPU, nothing downloaded but packages
# make test   the whole test suite
# Both make their own virtual environment first. With a GPU, bring your torch: make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
OUT    ?= runs/demo
STEPS  ?= 60
RANKS  ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export PATH := $(abspath $(BIN)):$(PATH)
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test clean

setup: $(READY)

# torch goes first and alone, so that no other package chooses its build.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --editable ".[test,prepare]"
	touch $(READY)

demo: $(READY)
	deepspeed --num_gpus $(RANKS) --module rtcwm.train.train --out $(OUT) --steps $(STEPS) --lr 2e-3 --lr-min 1e-4 --save-every 20

test: $(READY)
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) runs
