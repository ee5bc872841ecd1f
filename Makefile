# make demo   install, pack data/sample, verify, train a small model, evaluate, export, complete a sentence
# make test   install, then lint, types, contracts and every test
#
# One torch release is named because a bare "torch" brings the newest CUDA build, gigabytes that a CPU never uses, and
# because the tests' bit-for-bit claims were seen with this one. Another: make demo TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

.PHONY: demo test clean

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

demo: .venv/installed
	rm -rf $(DEMO) data/packed-sample data/packed-sample-eval
	$(BIN)/python -m pipeline.pack --source data/sample --tokenizer data/sample --max-tokens 2048 --out data/packed-sample
	$(BIN)/python -m pipeline.pack --source data/sample --tokenizer data/sample --max-tokens 2048 --split test_sft \
		--out data/packed-sample-eval
	$(BIN)/python -m pipeline.verify data/packed-sample --semantic
	$(BIN)/python -m trainer.train --shards data/packed-sample --eval-shards data/packed-sample-eval \
		--rows-per-step 1 --steps 320 --lr 2e-3 --warmup-steps 20 --out $(DEMO)
	$(BIN)/python -m trainer.demo $(DEMO) --shards data/packed-sample --eval-shards data/packed-sample-eval

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope

clean:
	rm -rf .venv runs data/packed* data/cache
