# `make demo` and `make test` do everything on a machine with Python 3.11, make and a C++ compiler; `make help` lists the rest.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FAST := $(VENV)/.installed-for-fast-tests
NLP := .venv-nlp
# `make test-paddle VERSION=3.3.0`: another Paddle than the newest, in an environment of its own.
VERSION ?= 3.3.0
OTHER := .venv-paddle-$(VERSION)
OTHER_PYTEST := TESTBED_BUILD=$(CURDIR)/testbed/build/paddle-$(VERSION) $(OTHER)/bin/python -m pytest
OUT := out/demo
TRAIN := examples/gpt.py --world 4
BIG := --preset gpt3-6.7b --layers 8 --pp 2 --mp 2 --micro-batches 8 --seq-len 2048 --batch-size 8
SHAPE := --pp 2 --mp 2 --micro-batches 8 --steps 5

# `make fuzz SECONDS=600 SEED=7`: for how long, and the number of the first plan; without a number the plans are others each time.
SECONDS ?= 3600
SEED ?=

# Processes that run tests side by side; on a machine with more cores, more of them: `make test WORKERS=8`.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# Processes that start by the hundred compile every module anew where bytecode is not stored.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-long test-paddle test-nlp mutants fuzz testbed lint setup clean

help:
	@echo "make demo     train a small GPT on 4 CPU ranks, baseline against Interlace; plan a large one (about 2 minutes)"
	@echo "make test-fast  the tests that need no Paddle, without long searches, random ones with a tenth of their examples (about a minute and a half on 2 cores, half a minute more the first time)"
	@echo "make test     every guarantee and feature: all tests but those marked long, random ones with a quarter of their examples (about 10 minutes on 2 cores, on slower ones up to twice that; WORKERS=8 runs 8 processes side by side, without it 2)"
	@echo "make test-long  the tests that need no Paddle, random ones with ten times their examples, stored programs in every configuration, and what is marked long: more combinations in training, up to eight ranks (an hour)"
	@echo "make test-paddle VERSION=3.3.0  the tests that need Paddle, with another version, in an environment of its own (.venv-paddle-3.3.0)"
	@echo "make test-nlp  the example with PaddleNLP's AutoTrainer, in an environment of its own (1.9 GB, in $(NLP); minutes to install, 2 to run)"
	@echo "make mutants  plants small faults and says which the tests do not find (ONLY=\"word ...\" for some of them)"
	@echo "make fuzz     random plans for an hour: what the checker calls safe on any target must be safe by the oracle (SECONDS=600 SEED=7)"
	@echo "make lint     ruff (rules and format) and mypy"
	@echo "make testbed  build the custom device that stands for a GPU in tests"
	@echo "make clean    remove $(VENV), $(NLP), environments of other Paddles and all outputs"

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[paddle,test]"
	touch $(STAMP)

$(FAST): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $(FAST)

demo: setup
	rm -rf $(OUT)
	mkdir -p $(OUT)
	@echo
	@echo "== 1. Equal bits: a small GPT trains on 4 CPU ranks, with unmodified Paddle and with Interlace"
	$(BIN)/interlace run $(TRAIN) --config demo --verify --json $(OUT)/run.json --log-dir $(OUT)/logs -- $(SHAPE)
	@echo
	@echo "What Interlace moved, and why (rank 0):"
	@$(BIN)/interlace show $(OUT)/plan/rank0.ilp --why
	@echo
	@echo "Its plan, proved and simulated:"
	$(BIN)/interlace check $(OUT)/plan
	@$(BIN)/interlace plan $(OUT)/plan/captured --config baseline --device h200 -o $(OUT)/baseline > $(OUT)/baseline.txt
	@$(BIN)/interlace timeline $(OUT)/plan --beside $(OUT)/baseline --device h200 -o $(OUT)/trace.json > $(OUT)/timeline.txt
	@echo "Layers 32 wide are too small for overlap to gain anything, and every extra operation costs host time: this part shows equal bits; times of processes on a CPU, and what is simulated of so small a model, say nothing about gains."
	@echo
	@echo "== 2. Time: 8 layers of GPT-3 6.7B, pp 2 x mp 2, planned without a GPU; times are simulated for an H200"
	$(BIN)/interlace dump examples/gpt.py --world 4 -o $(OUT)/big/captured -- $(BIG)
	@$(BIN)/interlace plan $(OUT)/big/captured --config baseline --device h200 -o $(OUT)/big/baseline > $(OUT)/big/baseline.txt
	@$(BIN)/interlace plan $(OUT)/big/captured --config overlap -o $(OUT)/big/interlace > $(OUT)/big/interlace.txt
	@echo
	@echo "What Interlace does, and what it brings (more: interlace show $(OUT)/big/interlace/rank0.ilp --why):"
	@cat $(OUT)/big/interlace.txt
	@echo "Its plan, proved:"
	$(BIN)/interlace check $(OUT)/big/interlace
	@echo
	@echo "Dumps of all ranks: $(OUT)/plan, $(OUT)/big. Timelines: $(OUT)/trace.json, $(OUT)/big/trace.json. Baseline beside Interlace:"
	$(BIN)/interlace timeline $(OUT)/big/interlace --beside $(OUT)/big/baseline --device h200 -o $(OUT)/big/trace.json
	@echo
	@echo "The same as a page to look at:"
	$(BIN)/interlace report $(OUT)/big/interlace -o $(OUT)/report.html

test: setup
	$(PYTEST) --examples 0.25

test-fast: $(FAST)
	$(PYTEST) --examples 0.1 -m "not paddle and not slow"

test-long: setup
	$(PYTEST) --examples 10 -m "not paddle"
	$(PYTEST) --long -m long

test-paddle: $(OTHER)/.installed
	$(OTHER_PYTEST) -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m "paddle"

$(OTHER)/.installed: setup.py pyproject.toml
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" "setuptools>=68" "paddlepaddle==$(VERSION)"
	touch $(OTHER)/.installed

test-nlp: $(NLP)/.installed
	$(NLP)/bin/python -m pytest tests/training/test_paddlenlp.py

$(NLP)/.installed: setup.py pyproject.toml
	test -x $(NLP)/bin/python || $(PYTHON) -m venv $(NLP)
	$(NLP)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[paddle,test,nlp]"
	touch $(NLP)/.installed

mutants: setup
	$(BIN)/python -m tests.mutants.run $(ONLY)

fuzz: setup
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

testbed: setup
	$(BIN)/python -m testbed.build

lint: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p interlace

clean:
	rm -rf $(VENV) $(NLP) .venv-paddle-* build out *.egg-info
