# make demo   trains and distils a streaming adapter on the embedded world: two processes, no GPU, no weights or data
# make test   the whole test suite
# Both make their own virtual environment first. With a GPU, bring your torch: make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
OUT    ?= runs/demo
STEPS  ?= 40
ITERS  ?= 3
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

# Diffusion forcing, then distillation, each by the DeepSpeed launcher; then 14-chunk streams against the truth: of the
# bidirectional adapter that all began with, after diffusion forcing, after distillation, with the same noise.
demo: $(READY)
	deepspeed --num_gpus $(RANKS) --module rtcwm.train.train --out $(OUT)/df --steps $(STEPS) --save-every 20 \
	    --lr 2e-3 --lr-min 1e-4
	deepspeed --num_gpus $(RANKS) --module rtcwm.train.distill --out $(OUT)/dmd --clips $(OUT)/df/clips --iters $(ITERS) \
	    --student-lora $(OUT)/df/lora_step$$(printf %05d $(STEPS)).safetensors --gen-lr 2e-4 --critic-lr 4e-4 --warmup 2 --critic-per-gen 2
	rtcwm evaluate --out $(OUT)/eval --run $(OUT)/dmd --chunks 14 --max_clips 1 \
	    --model+ start=released:few \
	    --model+ df=$(OUT)/df/lora_step$$(printf %05d $(STEPS)).safetensors:few \
	    --model+ distilled=$(OUT)/dmd/student_iter$$(printf %05d $(ITERS)).safetensors
	@echo "look at $(OUT)/eval/evaluate.png and evaluate.mp4; tensorboard --logdir $(OUT)"

test: $(READY)
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) runs
