# Each target builds .venv itself when it is missing or older than what it is built from.
#
#   make demo     train a small network on one parameter server and two workers
#   make test     tests of everything, some five minutes on two quiet cores
#                                                make test PYTEST_ARGS='-k wire -x'
#                                                make test TEST_PROCESSES=0 PYTEST_ARGS=--pdb
#   make test-all what continuous integration runs: each promise in each way, some fifteen minutes
#   make test-without   all tests without any plug-in, and what is left with each alone: an hour;
#                 with PLUGIN=graph all without that one; with WHOLE=1 all without each: half a day
#                                                make test-without PLUGIN=graph TESTS=tests/session
#   make test-slow   further cases of the same, more random schedules, every page's commands
#   make parity   a table: how far every way to spread a model is from one plain process
#   make mutants  changes the program in 400 small ways: do its tests notice?   MUTANTS_ARGS=--help
#   make fuzz     damaged frames, handshakes and checkpoints: a million, and ten thousand
#                                                make fuzz FUZZ_ARGS='--seed 7 --frames 5000000'
#   make soak     simulated jobs for as long as it is let, on all cores; goes on where it has stopped
#                                                make soak SOAK_ARGS='--schedules 200000'
#   make random-faults SECONDS=1200 SEED=1   workers killed and stopped at random; exact counts
#   make chaos SEED=1      servers, workers, hosts and the coordinator killed, stopped, cut off, added
#   make recovery          how long training pauses when a task dies, is stopped, or joins
#   make test-gpu the tests that need a GPU; the others hide it
#   make test-ray the tests that need a Ray cluster, which they start on this host
#   make test-spark    the tests that need PySpark, and Java 17
#   make test-slurm    the tests that need Slurm, of which they start four nodes on this host
#   make test-recipes  the programs in recipes/ with Transformers, Lightning, TorchMetrics, trackers
#   make browser-test   TensorBoard's dashboards in Chromium; screenshots in build/browser/
#   make wheel    a wheel and an sdist of the distribution trireme-train, in dist/
#   make wheel-test    installs it into an empty environment and trains there; with 3.12 and 3.13 too,
#                 where there is such a Python; else only their dependencies are resolved
#   make release  checks and builds a release, and says what a person types to publish it
#   make lint     style, types, direction of imports
#   make bench    the benchmarks               make bench BENCH_ARGS='--only a,b --quick'
#   make bench-peers   the environments of those that the benchmarks compare with
#   make docs     the site, in build/docs/html; runs the commands of its pages
#                                                make docs DOCS_ARGS='-D nb_execution_mode=off'
#   make pages    only what is generated in docs/, and a check of every link
#   make venv     only the environment           make venv PYTHON=/path/to/python3.12
#   make clean    remove the environment and what tools left behind
#
# On a machine without a GPU, PyTorch's own index has a build that is ten times smaller:
#   make venv PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# Leave that out where the index cannot be reached: pip would wait minutes for each package.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST_ARGS ?=
# Two more than there are cores, for many tests wait for processes that they have started. 0 is none
# beside pytest's own, as a debugger wants it.
TEST_PROCESSES ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 2)
MUTANTS_ARGS ?=
FUZZ_ARGS ?=
SOAK_ARGS ?=
MUTANTS_STAMP := .venv/.mutants-installed
RAY_STAMP := .venv/.ray-installed
SPARK_STAMP := .venv/.spark-installed
RECIPES_STAMP := .venv/.recipes-installed
SECONDS ?= 1200
SEED ?= 1
CHAOS_ARGS ?=
RECOVERY_ARGS ?=
BENCH_STAMP := .venv/.bench-installed
BENCH_ARGS ?=
TRANSFORMERS_STAMP := .venv/.transformers-installed
BROWSER_STAMP := .venv/.browser-installed
DOCS_STAMP := .venv/.docs-installed
DOCS_ARGS ?=
PEERS ?= .peers
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One BLAS thread a process, or processes that share the cores fight over them.
export OMP_NUM_THREADS ?= 1

# The first Python that really runs (a version manager's stub may not) and is new enough.
# Connects to every index of PIP_EXTRA_INDEX_URL; with a proxy pip alone knows the way.
REACH := import socket as s, sys, urllib.parse as p; \
    [s.create_connection((u.hostname, u.port or (80 if u.scheme == "http" else 443)), 10).close() \
    for u in map(p.urlsplit, sys.argv[1].split()) if u.hostname]
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
    if "$$p" -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then echo "$$p"; exit; fi; done)

.PHONY: venv demo test test-without test-all test-slow fuzz soak random-faults chaos recovery test-gpu test-ray test-slurm test-spark test-recipes browser-test parity mutants wheel wheel-test release lint bench \
	bench-peers docs pages clean

venv: $(STAMP)

# Python compiles what it imports when it first does, which is a seventh of what pip would compile.
$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
	  echo "make: no Python 3.11 or newer here: install one, or say make PYTHON=/path/to/it" >&2; \
	  exit 1; fi
	@if [ -n "$$PIP_EXTRA_INDEX_URL" ] && [ -z "$$https_proxy$$HTTPS_PROXY$$ALL_PROXY" ] && \
	  ! "$(PYTHON)" -c '$(REACH)' "$$PIP_EXTRA_INDEX_URL" 2>/dev/null; then \
	  echo "make: $$PIP_EXTRA_INDEX_URL cannot be reached within 10 s: leave PIP_EXTRA_INDEX_URL out" \
	    "(the PyTorch of PyPI is larger, and works without a GPU too)" >&2; exit 1; fi
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip  # Python 3.11's takes twice the time
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,examples]'
	@touch $@

demo: $(STAMP)
	$(BIN)/trireme run --ps 1 --workers 2 --run-dir runs/demo/$$(date +%m%d-%H%M%S) examples/digits.py
	@echo "look at the curves: $(BIN)/tensorboard --logdir runs/demo"

# Tests start hundreds of processes, which share what Python has compiled, even where the
# environment forbids it to write that.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

test-all: override PYTEST_ARGS += -m 'not slow' --hypothesis-profile=all
test-all: test

test-without: export PYTHONDONTWRITEBYTECODE :=
test-without: $(STAMP)
	$(BIN)/python -m tests.without $(PLUGIN) $(if $(WHOLE),--whole) -- -n $(TEST_PROCESSES) --dist worksteal $(TESTS) $(PYTEST_ARGS)

test-slow: override PYTEST_ARGS += -m slow
test-slow: wheel test

$(TRANSFORMERS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[transformers]'
	@touch $@

random-faults: $(STAMP)
	$(BIN)/python -m tests.random_faults --seconds $(SECONDS) --seed $(SEED)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(if $(filter command% env%,$(origin SEED)),--seed $(SEED)) $(CHAOS_ARGS)

recovery: $(STAMP)
	$(BIN)/python -m tests.chaos.recovery $(RECOVERY_ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.simulation.soak $(SOAK_ARGS)

parity: $(TRANSFORMERS_STAMP)
	PYTHONPATH=examples $(BIN)/python -m tests.parity.table

$(MUTANTS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	@touch $@

mutants: $(MUTANTS_STAMP)
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	@touch $@

test-gpu: $(STAMP)
	$(BIN)/pytest tests/gpu $(PYTEST_ARGS)

test-ray: $(RAY_STAMP)
	$(BIN)/pytest tests/integration/test_ray.py $(PYTEST_ARGS)

$(SPARK_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[spark]'
	@touch $@

test-spark: $(SPARK_STAMP)
	@if ! command -v java >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update --quiet && apt-get install --quiet --yes openjdk-17-jre-headless; fi
	$(BIN)/pytest -m spark tests/integration/test_spark.py $(PYTEST_ARGS)

test-slurm: $(STAMP)
	@if ! command -v sbatch >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update --quiet && apt-get install --quiet --yes slurm-wlm munge; fi
	$(BIN)/pytest -m slurm tests/integration/test_slurm.py $(PYTEST_ARGS)

$(RECIPES_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[recipes]'
	@touch $@

test-recipes: $(RECIPES_STAMP)
	@command -v c++ >/dev/null || \
	  echo "make: torch.compile IS NOT TESTED: no C++ compiler here: apt-get install g++" >&2
	$(BIN)/pytest -m 'recipes or not slow' tests/recipes $(PYTEST_ARGS)

$(BROWSER_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	@touch $@

browser-test: $(BROWSER_STAMP)
	@if ! command -v chromedriver >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update --quiet && apt-get install --quiet --yes chromium chromium-driver; \
	  else \
	    echo "make: NOTHING IS TESTED: no Chromium here: apt-get install chromium chromium-driver" >&2; \
	  fi; fi
	$(BIN)/pytest -m browser tests/browser $(PYTEST_ARGS)

wheel: $(STAMP)
	rm -f dist/trireme_train-*
	$(BIN)/python -m build --outdir dist . >/dev/null
	@ls dist/trireme_train-*

wheel-test: wheel
	$(BIN)/pytest -m slow tests/integration/test_wheel.py $(PYTEST_ARGS)

release: $(STAMP)
	$(BIN)/python -m tests.release
	$(MAKE) lint
	$(MAKE) test-all
	$(MAKE) wheel-test
	$(BIN)/python -m tests.release --built

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks --peers $(PEERS) $(BENCH_ARGS)

bench-peers: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.peers --directory $(PEERS)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m bash_kernel.install --sys-prefix
	@touch $@

docs: $(DOCS_STAMP)
	$(BIN)/python docs/guide_figures.py
	$(BIN)/python docs/build.py
	$(BIN)/sphinx-build -W --keep-going -q -j 2 -c docs $(DOCS_ARGS) . build/docs/html
	$(BIN)/python docs/site_checks.py build/docs/html
	@echo "open build/docs/html/index.html"

pages: $(STAMP)
	$(BIN)/python docs/build.py

clean:
	rm -rf .venv .peers .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
