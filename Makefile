# Two commands do everything on a machine with Python 3.11 and make: `make demo`, `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT := out/demo
TRAIN := examples/gpt.py --world 4
BIG := --preset gpt3-6.7b --layers 8 --pp 2 --mp 2 --micro-batches 8 --seq-len 2048 --batch-size 8
SHAPE := --pp 2 --mp 2 --micro-batches 8 --steps 5

.PHONY: demo test testbed lint setup clean

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[paddle,test]"
	touch $(STAMP)

demo: setup
	rm -rf $(OUT)
	mkdir -p $(OUT)
	$(BIN)/interlace run $(TRAIN) --config demo --verify --json $(OUT)/run.json --log-dir $(OUT)/logs -- $(SHAPE)
	@echo
	@echo "What was moved, and why (rank 0):"
	@$(BIN)/interlace show $(OUT)/plan/rank0.ilp --why
	@echo
	$(BIN)/interlace check $(OUT)/plan
	@$(BIN)/interlace plan $(OUT)/plan/captured --config stock --device h200 -o $(OUT)/stock > $(OUT)/stock.txt
	@$(BIN)/interlace timeline $(OUT)/plan --beside $(OUT)/stock --device h200 -o $(OUT)/trace.json
	@echo
	@echo "The same at real size, planned without a GPU: 8 layers of GPT-3 6.7B, pp 2 x mp 2 (times are simulated for an H200)"
	$(BIN)/interlace dump examples/gpt.py --world 4 -o $(OUT)/big/captured -- $(BIG)
	@$(BIN)/interlace plan $(OUT)/big/captured --config stock --device h200 -o $(OUT)/big/stock > $(OUT)/big/stock.txt
	@$(BIN)/interlace plan $(OUT)/big/captured --config overlap -o $(OUT)/big/plan > $(OUT)/big/plan.txt
	$(BIN)/interlace check $(OUT)/big/plan
	@$(BIN)/interlace timeline $(OUT)/big/plan --beside $(OUT)/big/stock --device h200 -o $(OUT)/big/trace.json
	@echo
	@echo "dumps of all ranks: $(OUT)/plan and $(OUT)/big; timelines: $(OUT)/trace.json and $(OUT)/big/trace.json (open in ui.perfetto.dev)"

test: setup
	$(BIN)/python -m pytest

testbed: setup
	$(BIN)/python -m testbed.build

lint: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/ruff check .
	rm -rf build/types && mkdir -p build/types
	cp -r interlace build/types/interlace
	for folder in passes cost_model scheduler configs; do cp -r $$folder build/types/interlace/$$folder; done
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p interlace

clean:
	rm -rf $(VENV) build out *.egg-info
