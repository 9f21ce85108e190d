# Every target sets up .venv by itself on first use, and again when setup.py or constraints.txt change.
PYTHON ?= python3
SEED ?= 0
SEEDS ?= 0 1 2
TEST_ARGS ?= -n 2 --dist worksteal
MUTANT ?=
BENCH ?= model train engine step search
CONFIG ?= configs/quickstart.py
RUNS ?= runs/quickstart

VENV := .venv
STAMP := $(VENV)/.stamp
PY := $(VENV)/bin/python
# torch is in an environment of its own: nothing but the making of golden files may find it.
PARITY := .venv-parity
PARITY_STAMP := $(PARITY)/.stamp

# Temporary buffers of a decode round are large: huge pages spare glibc thousands of page faults a round.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help setup train test parity golden evidence bench lint mutants clean

help:
	@echo "make train [SEED=0]       warm start, GRPO, evaluation; writes runs/quickstart/seed\$$SEED/result.json"
	@echo "make test [TEST_ARGS=]    the test-suite"
	@echo "make parity               torch and transformers still compute what the golden files say"
	@echo "make golden               write the golden files anew"
	@echo "make evidence             three seeds of make train, and warm start alone for the same minutes"
	@echo "make bench                one JSON line per workload"
	@echo "make lint                 ruff"
	@echo "make mutants [MUTANT=]    breaks each guarded line in a copy and demands that its law turns red"

setup: $(STAMP)

# The stamp is written last: an interrupted install is done again.
$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(0 if v >= (3, 11) else f"error: got Python {v[0]}.{v[1]}, want 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

$(PARITY_STAMP): setup.py constraints.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[test,parity]'
	@touch $@

train: $(STAMP)
	$(PY) -m launch.quickstart --config=$(CONFIG) --seed=$(SEED) --workdir=$(RUNS)/seed$(SEED)

test: $(STAMP)
	$(PY) -m pytest -q $(TEST_ARGS)

parity: $(PARITY_STAMP)
	$(PARITY)/bin/python -m pytest -q tests/golden/parity.py

golden: $(PARITY_STAMP)
	$(PARITY)/bin/python -m tests.golden.make

evidence: $(STAMP)
	for seed in $(SEEDS); do \
	  $(PY) -m launch.quickstart --config=$(CONFIG) --seed=$$seed --workdir=$(RUNS)/seed$$seed --control || exit 1; \
	done
	$(PY) -m launch.report $(foreach seed,$(SEEDS),--collect=$(RUNS)/seed$(seed))

bench: $(STAMP)
	for name in $(BENCH); do $(PY) -m launch.bench $$name || exit 1; done

lint: $(STAMP)
	$(PY) -m ruff check .

mutants: $(STAMP)
	$(PY) -m tests.laws.mutants $(MUTANT)

clean:
	rm -rf $(VENV) $(PARITY) build .pytest_cache .ruff_cache *.egg-info
