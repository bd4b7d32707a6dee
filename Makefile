# Tidegate. `make serve` needs nothing but Python 3.11; everything lands in .venv, .run and ~/.cache/tidegate.

.DEFAULT_GOAL := help
.SILENT:
MAKEFLAGS += --no-print-directory

export PYTHON
PY := .venv/bin/python
PYTEST := $(PY) -m pytest --quiet
# Live suites run a failed test once more and say so (RERUN): HAProxy, Ray and the tests share two cores. What hangs is not repeated.
LIVE := $(PYTEST) --reruns 1 --reruns-delay 5 --rerun-except "from pytest-timeout" -raR --durations 25
UNIT := tests/unit tests/test_architecture.py
PROPERTY := tests/property tests/sim
STACK := tests/contract tests/serve
ENGINE := tests/engine
BENCHES := startup added_ttft relay_cpu affinity token_budget batch_goodput speculation scaling controller_kill explained control_tick control_week sim_accuracy sim_speed \
	disaggregation rollback sim_live compare dynamo_r1 request_cpu fairness retry_storm replica_kill node_kill overload scenarios joint soak elastic boards transitions

.PHONY: help serve stop model doctor check format lint types imports quick quick_property unit property test stack engine sim bench lock install dev page

help: ## Show this
	grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{ printf "  make %-8s %s\n", $$1, $$2 }'

serve: install ## Start Tidegate here and stay until Ctrl-C (options: make serve ARGS='--help')
	exec $(PY) -m deployments.cli up $(ARGS)

stop: ## End what `make serve` started from this folder, and nothing else
	if [ -x $(PY) ]; then exec $(PY) -m deployments.cli down; else echo "nothing to end"; fi

model: install ## Fetch and convert the bundled model (make model ARGS=--verify compares checksums)
	exec $(PY) -m deployments.cli model $(ARGS)

doctor: install ## Check configuration and machine, start nothing
	exec $(PY) -m deployments.cli doctor $(ARGS)

check: dev ## Format, lint, types, import rules, quick pure tests; about a minute once types are cached
	$(MAKE) format lint imports
	$(MAKE) -j3 --output-sync=target types quick quick_property

format: dev
	$(PY) -m ruff format --check --quiet . || { echo "error: not formatted; run: .venv/bin/ruff format ." >&2; exit 1; }

lint: dev
	$(PY) -m ruff check --quiet .

types: dev
	$(PY) -m mypy --no-error-summary

imports: dev
	out=$$(.venv/bin/lint-imports --no-cache 2>&1) || { echo "$$out"; exit 1; }

quick: dev
	$(PYTEST) -m "not slow" $(UNIT)

quick_property: dev
	TIDEGATE_EXAMPLES_SHARE=0.1 $(PYTEST) tests/property

unit: dev
	$(PYTEST) $(UNIT)

property: dev
	$(PYTEST) $(PROPERTY)

test: dev ## All tests: pure, then Ray Serve with emulated engines, then real vLLM; about 40 minutes
	$(MAKE) -j2 --output-sync=target unit property
	$(MAKE) stack
	$(MAKE) engine

stack: dev
	$(LIVE) -m "not engine" $(STACK)

engine: dev
	$(PY) -m deployments.cli model
	$(LIVE) -m engine tests/contract
	$(LIVE) $(ENGINE)

sim: dev ## Check the policies in scenarios drawn from a seed: make sim SEED=7 COUNT=100
	$(PY) -m deployments.simulation.swarm --seed $(or $(SEED),1) --count $(or $(COUNT),1)

page: dev ## Test the page at /dashboard in Chromium, with axe-core; then measure it (needs chromium and npm)
	browser=$$(command -v chromium || command -v chromium-browser || command -v google-chrome) \
		|| { echo "error: no Chromium; on Debian: apt-get install chromium" >&2; exit 1; }; \
	[ -f .cache/package/axe.min.js ] || { mkdir -p .cache && cd .cache && npm pack --silent axe-core@4.10.3 >/dev/null \
		&& tar xzf axe-core-4.10.3.tgz package/axe.min.js && cd ..; }; \
	export TIDEGATE_CHROMIUM=$$browser TIDEGATE_AXE=$$PWD/.cache/package/axe.min.js; \
	$(PYTEST) tests/unit/test_dashboard_browser.py && $(PY) -m tests.bench.page

bench: dev ## Run every benchmark and print its table
	$(PY) -m deployments.cli model
	set -e; for name in $(BENCHES); do echo; echo "== $$name"; $(PY) -m tests.bench.$$name; done

lock: dev ## Resolve requirements/*.lock anew
	$(PY) requirements/lock.py

install:
	requirements/install.sh cpu

dev:
	requirements/install.sh cpu dev hosting dashboards
