# What this project can be asked for; `make` alone lists it. Needs Python 3.11+ with venv and pip, and a JDK 17+.

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; PYTHON=… overrides.
PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$each >/dev/null 2>&1 && $$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$each; break; }; done)
# Tests start hundreds of short Python processes: bytecode is kept, whatever the environment says, and out of the way.
KEEP_BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/pycache
PYTEST := $(KEEP_BYTECODE) $(BIN)/python -m pytest
# Test processes at once: more than there are cores, since many tests wait. Each has Kafkas of its own, of up to 3 GB, but
# for the last one: it begins with what needs none.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 2 : 6)))
ALL_AT_ONCE := -n $(WORKERS)
NATIVE_SOURCES := $(wildcard native/src/*.rs) native/Cargo.toml native/Cargo.lock native/.cargo/config.toml
KAFKA_VERSIONS_OLDER := 4.2.2 4.1.2 4.0.2 3.9.2

.DEFAULT_GOAL := help
.PHONY: help demo bench test test-all test-stopped test-fast test-kafka test-brokers simulate fuzz mutants kill-matrix specification soak order-proof eos-proof sasl-ssl-proof releases test-foreign spark-faults crash-steps docs dist release native lint lock clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

help:  ## this list
	@echo "make TARGET, where TARGET is:"
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s%s\n", $$1, $$2 }'
	@echo "The first run installs into $(VENV) what locks/ pins by hash. PYTHON=… chooses the Python (3.11 or newer)."

demo: $(VENV)/.installed-run  ## see it work: real Kafka, the proxy, a Spark bulk load that is killed half way
	@$(BIN)/fencepost demo

test: lint jars  ## lint, then the tests in tests/quick.txt, with real Kafka and Spark; WORKERS=4 processes at once
	@$(PYTEST) $(ALL_AT_ONCE) -m "not soak" @tests/quick.txt

test-all: lint jars  ## lint, then every test and its long form, with coverage; continues after an interruption: hours
	@$(KEEP_BYTECODE) $(BIN)/python -m tests.all --coverage -- $(ALL_AT_ONCE)

test-stopped: jars  ## FILES=… (tests/quick.txt) while processes of the run are stopped at random for up to 3 s (SEED=…)
	@$(KEEP_BYTECODE) $(BIN)/python -m tests.stopped $(if $(SEED),--seed $(SEED)) -- $(ALL_AT_ONCE) -m "not soak" $(or $(FILES),@tests/quick.txt)

test-fast: $(VENV)/.installed-all  ## only the tests that need no Kafka, Spark or Docker
	@$(PYTEST) $(ALL_AT_ONCE) -m "not kafka and not spark and not docker and not soak"

test-kafka: jars  ## only the tests against real Kafka
	@$(PYTEST) $(ALL_AT_ONCE) -m "kafka and not soak"

SEEDS ?= 20000
simulate: $(VENV)/.installed-all  ## SEEDS=20000 runs of the proxy among modelled brokers, clients and faults
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS)

SECONDS ?= 300
fuzz: $(VENV)/.installed-all  ## SECONDS=300 of made-up dialogues and messages, from SEED=1 on; keeps what fails in tests/fuzz/corpus
	@FENCEPOST_EXAMPLES=500 $(PYTEST) -q -m hypothesis tests/unit
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(or $(SEED),1)

mutants: $(VENV)/.installed-all  ## every seeded defect: does the simulation notice it? Writes tests/simulation/mutants.md
	@$(BIN)/python -m tests.simulation.mutants

kill-matrix: $(VENV)/.installed-all  ## which fast tests notice which seeded and generated defects? Writes tests/kill_matrix.md: 40 minutes
	@$(BIN)/python -m tests.kill_matrix

specification: jars  ## TLC checks every model of specification/, and each rule by leaving it out: about 15 minutes
	@$(BIN)/python -m tests.specification

MINUTES ?= 20
soak: jars  ## MINUTES=20 of real clients against real Kafka under faults (SEED=…), every answer held against the log
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

order-proof: jars  ## groups of every client and protocol read a topic that grows: does each key stay in order? Prints the table
	@$(BIN)/python -m tests.order_proof

KILLS ?= 50
eos-proof: jars  ## consume-transform-produce under KILLS=50 kills of applications, proxies, brokers: each input once? Prints the table
	@$(BIN)/python -m tests.eos_proof --kills $(KILLS)

sasl-ssl-proof: jars  ## every client and mechanism, with TLS, at Kafka and through the proxy: is it the same? Prints the table
	@$(BIN)/python -m tests.sasl_ssl_proof

releases: jars  ## each Kafka release: what it tells its clients, a story through the proxy. Prints the tables
	@$(BIN)/python -m tests.releases

test-foreign: jars  ## client authors' own tests, at Kafka and through the proxy. Prints the table; SOURCES=DIR for what no registry has
	@$(KEEP_BYTECODE) $(BIN)/python -m tests.foreign $(if $(SOURCES),--sources $(SOURCES)) $(FOREIGN)

spark-faults: jars  ## Spark drivers, tasks, executors, checkpoints, proxy and broker fail under the sink, and Spark's own. Prints the table
	@$(KEEP_BYTECODE) $(BIN)/python -m tests.spark_faults $(FAULTS)

crash-steps: jars  ## a topic grows, and the proxy dies before and after each step, or the broker does
	@$(PYTEST) -q -m "" -k killed --durations=0 tests/integration/test_partition_expansion.py

bench: jars  ## all routes to Kafka measured in one run, then TLS, several proxies, Metadata; BENCH="--only 'produce*'" for less (docs/performance.md)
	@$(BIN)/python -m benchmarks $(BENCH)
ifeq (,$(findstring --only,$(BENCH)))
	@$(BIN)/python -m benchmarks.secured $(findstring --quick,$(BENCH))
	@$(BIN)/python -m benchmarks.claims
	@$(BIN)/python -m benchmarks.metadata
endif

test-brokers: jars  ## the core tests on older Kafka releases
	@set -e; for version in $(KAFKA_VERSIONS_OLDER); do \
		echo "Kafka $$version"; FENCEPOST_KAFKA=$$version $(PYTEST) $(ALL_AT_ONCE) -m "brokers and not soak"; done

lint: $(VENV)/.installed-all  ## ruff, mypy, import layers; rustfmt and clippy, if they are installed
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@! cargo fmt --version >/dev/null 2>&1 || { cd native && cargo fmt --check; }
	@! cargo clippy --version >/dev/null 2>&1 || { cd native && cargo clippy -q --release --locked -- -D warnings; }

docs: $(VENV)/.installed-all  ## the site of docs/, in build/site; a link that leads nowhere is an error
	@$(BIN)/zensical build --clean --strict

# The versions that a user gets who installs it today; the test has those of locks/proxy.txt.
dist: jars $(VENV)/.packages-dist  ## sdist, and wheel with the native module (FENCEPOST_NATIVE=off: without), in dist/; both tested
	@rm -rf dist build/dist
	@FENCEPOST_NATIVE=$${FENCEPOST_NATIVE:-on} $(BIN)/hatchling build -t sdist -t wheel
	@$(PYTHON) -m venv build/dist
	@build/dist/bin/pip install -q --disable-pip-version-check "$$(echo dist/*.whl)[proxy]"
	@cd build/dist && bin/fencepost --version && bin/fencepost proxy --help >help
	@DIST=$(if $(filter off,$(FENCEPOST_NATIVE)),,dist) $(PYTEST) -q tests/integration/test_distribution.py

release:  ## TAG=v0.1.0: all that a release consists of, in build/release, each part tried; RELEASE="--without aarch64" (CONTRIBUTING.md)
	@$(PYTHON) -m release $(if $(TAG),--tag $(TAG)) $(RELEASE)

native: $(VENV)/.installed-run  ## the native module (Rust), which the other targets build only if there is cargo; says why not
	@$(BIN)/python hatch_build.py --required

# Where the progress of a first download can be seen: pytest would swallow it.
.PHONY: jars
jars: $(VENV)/.installed-all
	@$(BIN)/python -m fencepost_dev.jars
	@$(BIN)/python -m fencepost_dev.archive_writer

# Compiled together so that they agree: proxy and spark are what the container images install (with what builds PySpark
# and fetches its jars); the bootstrap is what installs the others.
COMPILE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
lock: $(VENV)/.installed-all  ## pin again what pyproject.toml asks for (UPGRADE=1: the newest versions)
	@$(COMPILE) $(if $(UPGRADE),--upgrade) --all-extras --group test --group docs --group build pyproject.toml -o locks/all.txt
	@$(COMPILE) --extra proxy --extra dev --extra spark --group build -c locks/all.txt pyproject.toml -o locks/run.txt
	@$(COMPILE) --extra proxy --group build -c locks/all.txt pyproject.toml -o locks/proxy.txt
	@$(COMPILE) $(if $(UPGRADE),--upgrade) --group dist -c locks/all.txt pyproject.toml -o locks/dist.txt
	@$(COMPILE) $(if $(UPGRADE),--upgrade) --group release --group dist --group build -c locks/all.txt -c locks/dist.txt pyproject.toml -o locks/release.txt
	@printf 'jgo\nsetuptools\n' | $(COMPILE) --extra spark -c locks/all.txt pyproject.toml - -o locks/spark.txt
	@$(if $(UPGRADE),echo uv | $(COMPILE) --upgrade - -o locks/bootstrap.txt)
	@echo "locks/ is up to date; the jars' locks have a command of their own: $(BIN)/python -m fencepost_dev.lock --help"

clean:  ## remove .venv and everything that tools left behind
	@rm -rf $(VENV) build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .cache .hypothesis native/target native/*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- .venv ------------------------------------------------------------------------------------------------------------
# uv installs twice as fast as pip, and a second time at once. Where it cannot reach a package index (one that only
# pip's own configuration names), pip does the same from the same hashes.

ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

$(VENV)/.uv: locks/bootstrap.txt
	@if [ -z "$(PYTHON)" ]; then echo "fencepost needs Python 3.11 or newer; none found. Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "fencepost needs Python 3.11 or newer; $(PYTHON) is older or missing" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV); on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	@$(BIN)/pip install -q --disable-pip-version-check --retries 1 --require-hashes -r $< 2>$(VENV)/install.log || { \
		echo "cannot install Python packages: no network, or no package index within reach (see $(VENV)/install.log). Connect, or set PIP_INDEX_URL and UV_DEFAULT_INDEX to an index that can be reached, and run make again" >&2; exit 1; }
	@touch $@

# Without cargo, or if the build fails, Fencepost runs in pure Python.
$(VENV)/.installed-run $(VENV)/.installed-all: $(VENV)/.installed-%: $(VENV)/.packages-% hatch_build.py $(NATIVE_SOURCES)
	@$(BIN)/python hatch_build.py
	@touch $@

$(VENV)/.packages-%: locks/%.txt pyproject.toml $(VENV)/.uv
	@echo "installing what $< pins (the first time a download of up to several hundred MB)"
	@$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r $< \
		|| { echo "uv did not manage; trying pip" >&2; $(BIN)/pip install -q --disable-pip-version-check --require-hashes -r $<; } \
		|| { echo "cannot install what $< pins; see above. Without a network: connect, and run make again" >&2; exit 1; }
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
