# Every target sets up what it needs; nothing but Python 3.11 or newer has to be there before.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
NAME ?= all
KILLS ?= 300
SERVER_KILLS ?= 50
ROUNDS ?= 20
SECONDS ?= 60
SCHEDULES ?= 10000
OUTAGES ?= 3
SYPHON_KILLS ?= 200
DEMO_KILLS ?= 200
DEMOS ?= 30
OUTBOX_KILLS ?= 20
MIXED_KILLS ?= 20
HOSTILE_SECONDS ?= 120
CUTS ?= 300
FUZZ_ROUNDS ?= 50
WIRE_RUNS ?= 1000
CLUSTER_SECONDS ?= 600

# Tests start a thousand processes: without compiled files, each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench soak docs dist lock clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(READY) ## make the virtual environment

$(READY): requirements/dev.txt requirements/docs.txt requirements/java.txt requirements/proton.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Twinbus needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt \
	-r requirements/docs.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(RUN) -m twinbus.spark.java >/dev/null 2>&1 || { echo "no Java 17 or newer here: bringing one for Spark"; \
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/java.txt; }
	@$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/proton.txt >/dev/null 2>&1 \
	|| echo "no C compiler here: the tests against Qpid Proton will be skipped"
	@touch $@

$(BENCH_READY): $(READY) requirements/bench.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@touch $@

demo: $(READY) ## watch an application send on while its broker is killed with -9, and Spark bring all home (PRIMARY=servicebus, rabbitmq)
	$(VENV)/bin/twinbus demo --report build/outage.html $(if $(PRIMARY),--primary $(PRIMARY))

# Groups that take about as long. Tests that start a Spark of their own must be apart from the others.
PAGES := tests/browser tests/releases tests/scenarios/test_examples.py tests/scenarios/test_pages.py \
	tests/scenarios/test_readme.py tests/scenarios/test_tutorial.py
OWN_SPARK := tests/spark/test_interrupted_start.py tests/spark/test_java_death.py \
	tests/spark/test_kills.py tests/spark/test_syphon_command.py tests/spark/test_trace_example.py
TABLES := tests/spark/test_file_systems.py tests/spark/test_metrics.py tests/spark/test_reconciliation.py \
	tests/spark/test_report.py tests/spark/test_source.py tests/spark/test_source_options.py \
	tests/spark/test_source_troubles.py
CHECKS := $(RUN) -m ruff format --check . && $(RUN) -m ruff check . && $(RUN) -m mypy && $(VENV)/bin/lint-imports
COMMANDS := $(wildcard tests/scenarios/test_cli_*.py)
PROCESSES := tests/scenarios/test_pairing_processes.py tests/scenarios/test_restore_processes.py

test: $(READY) ## run the checks and every test, in nine processes side by side (17 minutes)
	@mkdir -p build; rm -f build/error-texts.txt; \
	{ $(CHECKS); } >build/checks.txt 2>&1 & checks=$$!; \
	$(RUN) -m pytest tests/spark $(OWN_SPARK:%=--ignore=%) $(TABLES:%=--ignore=%) >build/test-spark.txt 2>&1 & spark=$$!; \
	$(RUN) -m pytest $(OWN_SPARK) >build/test-own-spark.txt 2>&1 & own=$$!; \
	$(RUN) -m pytest $(TABLES) $(PAGES) >build/test-tables.txt 2>&1 & tables=$$!; \
	$(RUN) -m pytest tests/scenarios $(PAGES:%=--ignore=%) $(COMMANDS:%=--ignore=%) $(PROCESSES:%=--ignore=%) >build/test-scenarios.txt 2>&1 & scenarios=$$!; \
	$(RUN) -m pytest tests/contracts >build/test-contracts.txt 2>&1 & contracts=$$!; \
	$(RUN) -m pytest tests/rabbitmq $(PROCESSES) >build/test-rabbitmq.txt 2>&1 & rabbitmq=$$!; \
	$(RUN) -m pytest tests/interop $(COMMANDS) >build/test-interop.txt 2>&1 & interop=$$!; \
	$(RUN) -m pytest tests/unit tests/simulation; others=$$?; \
	wait $$interop; interop=$$?; cat build/test-interop.txt; \
	wait $$contracts; contracts=$$?; cat build/test-contracts.txt; \
	wait $$rabbitmq; rabbitmq=$$?; cat build/test-rabbitmq.txt; \
	wait $$spark; spark=$$?; cat build/test-spark.txt; \
	wait $$own; own=$$?; cat build/test-own-spark.txt; \
	wait $$tables; tables=$$?; cat build/test-tables.txt; \
	wait $$scenarios; scenarios=$$?; cat build/test-scenarios.txt; \
	wait $$checks; checks=$$?; cat build/checks.txt; \
	exit $$((checks + spark + own + tables + scenarios + contracts + rabbitmq + interop + others))

check: $(READY) ## format, lint, strict types, import rules
	$(CHECKS)

format: $(READY) ## put the code into its format
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(BENCH_READY) ## run the benchmarks (NAME=broker for one, QUICK=1 for a short run, RECORD=1 into docs/performance.md)
	$(RUN) bench/run.py $(NAME) $(if $(QUICK),--quick) $(if $(RECORD),--record)

soak: $(READY) ## long runs: outages, kill -9 under load, bad bytes, many clients (KILLS=300 ...)
	$(RUN) -m tests.soak.outages --schedules $(SCHEDULES)
	$(RUN) -m tests.soak.pairing_outage --rounds $(OUTAGES)
	$(RUN) -m tests.soak.rabbitmq_outage --outages $(OUTAGES)
	$(RUN) -m tests.soak.azure_outage --outages $(OUTAGES)
	$(RUN) -m tests.soak.crash --kills $(KILLS)
	$(RUN) -m tests.soak.server_kill --kills $(SERVER_KILLS)
	$(RUN) -m tests.soak.syphon_kill --kills $(SYPHON_KILLS)
	$(RUN) -m tests.soak.syphon_kill --kills $(SYPHON_KILLS) --secondary sb
	$(RUN) -m tests.soak.demo_kills --kills $(DEMO_KILLS)
	$(RUN) -m tests.soak.demos --demos $(DEMOS)
	$(RUN) -m tests.soak.demos --demos $(OUTAGES) --primary servicebus
	$(RUN) -m tests.soak.demos --demos $(OUTAGES) --primary rabbitmq
	$(RUN) -m tests.soak.outbox_kill --kills $(OUTBOX_KILLS)
	$(RUN) -m tests.soak.mixed_clients --kills $(MIXED_KILLS)
	$(RUN) -m tests.soak.bad_bytes --rounds $(ROUNDS)
	$(RUN) -m tests.soak.many_clients --seconds $(SECONDS)
	$(RUN) -m tests.soak.hostile_neighbour --seconds $(HOSTILE_SECONDS)
	$(RUN) -m tests.soak.restore
	$(RUN) -m tests.soak.power_cut --cuts $(CUTS)
	$(RUN) -m tests.soak.command_fuzz --rounds $(FUZZ_ROUNDS)
	$(RUN) -m tests.soak.wire --runs $(WIRE_RUNS)
	$(RUN) -m tests.soak.cluster --seconds $(CLUSTER_SECONDS)

docs: $(READY) ## build the site, with the API reference, in build/docs
	$(RUN) docs/site/build_site.py

dist: $(READY) ## build the wheel and the source distribution in dist
	$(VENV)/bin/hatchling build

lock: ## pin and hash the dependencies (needs uv)
	for name in runtime azure cli metrics server spark rabbitmq otel java dev docs proton bench; do \
	uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --python-version 3.11 \
	--custom-compile-command 'make lock' requirements/$$name.in -o requirements/$$name.txt; done

clean: ## remove everything that was made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
