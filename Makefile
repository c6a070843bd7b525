# make help lists the targets. Everything lives in .venv and in $XDG_CACHE_HOME/gpu-exporter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each process of pytest runs whole files: see tests/conftest.py. A test that waits leaves its core to the others.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/python -m pytest -q $(if $(CI),--durations=20)
ALL_CORES := -n $(shell expr $(CORES) + 1) --dist=loadscope
WAITING := -n $(shell expr $(CORES) \* 2) --dist=loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test lint types generated quick verify servers slow hook e2e format bench bench-hook golden faults fuzz coverage mutants rule-mutants soak preview gpu-check packages-check hours-check locks manifests packages workflows release-dry-run generate testbed programs programs-start clean

help: ## show this list
	@awk -F ':.*## ' '/^# --- /{print "\n" substr($$0, 7)} /^[a-z0-9-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Installs without a compiler. A changed pyproject.toml installs again.
$(VENV)/runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("gpu-exporter needs Python 3.10 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 10) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/dev: $(VENV)/runtime
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# --- Every day
demo: $(VENV)/runtime ## a simulated node: the holder of every GPU, and the labels of a dry run; Ctrl-C ends it
	@$(BIN)/gpu-exporter demo

test: $(VENV)/dev ## what each change has to pass: lint, types, generated files, quick tests; no root, no server
	@.ci/stages lint quick+types,generated

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v promtool >/dev/null && command -v amtool >/dev/null; then set -ex; \
	  promtool check rules --lint=all --lint-fatal alerts/rules/*.yaml alerts/rules/optional/*.yaml; \
	  promtool check config --syntax-only alerts/prometheus.example.yaml grafana/prometheus.yaml; \
	  amtool check-config alerts/alertmanager/alertmanager.yaml; \
	  $(BIN)/python alerts/owners.py alerts/alertmanager/owners.yaml --check; \
	elif [ -n "$$CI" ]; then echo "promtool and amtool are missing" >&2; exit 1; \
	else echo "skipped: promtool and amtool are not installed (make testbed, as root on Debian)"; fi

types: $(VENV)/dev
	$(BIN)/mypy

generated: $(VENV)/dev
	$(BIN)/python -m tools.generate --check

quick: $(VENV)/dev
	$(PYTEST) $(ALL_CORES) -m quick

format: $(VENV)/dev ## format the code, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/dev ## defaults.py, docs/metrics.md, the picture of the packages, alerts/rules, the dashboard, the chart's copies
	$(BIN)/python -m tools.generate

golden: $(VENV)/dev ## rewrite the golden files; review the diff
	$(PYTEST) tests/unit tests/rules -k "golden or reports" --update-golden

manifests: $(VENV)/runtime ## the chart as plain manifests in out/manifests.yaml (PRESET=gke, VALUES=FILE, NAMESPACE=NAME)
	@$(BIN)/python -m tools.manifests $(if $(PRESET),--preset=$(PRESET)) $(if $(VALUES),--values=$(VALUES)) $(if $(NAMESPACE),--namespace=$(NAMESPACE))

packages: $(VENV)/runtime ## archive, deb and rpm for nodes without Kubernetes, with checksums, in out/packages; needs the network (INTERPRETER=1: also with a Python)
	@$(BIN)/python -m tools.node_package $(if $(INTERPRETER),--interpreter)

clean:
	rm -rf $(VENV) out build exporter/*.egg-info

# --- Long, on real servers: as root on Debian; elsewhere each test that cannot run says why
verify: $(VENV)/dev testbed programs ## slow tests, and those on API server, kubelet, Slurm, Prometheus and torch; the acceptance test
	@.ci/stages servers+slow,hook e2e

servers: $(VENV)/dev
	$(PYTEST) $(WAITING) -m "not quick" tests/component tests/rules

slow: $(VENV)/dev
	$(PYTEST) $(ALL_CORES) -m "not quick" tests/unit

hook: ## the hook in loops of a real torch, in an environment of its own (5 GB, once); SET=old (PYTHON=python3.9) or frameworks
	@packages="$$($(PYTHON) -m tests.testbed.torch_env $(or $(SET),ci))" && PYTHONPATH="$$packages:exporter/hook:." \
	  $(PYTHON) -m pytest -p no:cacheprovider -c tests/hook/pytest.ini --confcutdir=tests/hook $(if $(filter frameworks,$(SET)),tests/hook/frameworks,tests/hook/loops)

e2e: $(VENV)/dev testbed programs ## image and chart on a real cluster, from the driver to a notification and a label
	$(PYTEST) $(WAITING) -m "not quick" tests/e2e

faults: $(VENV)/dev ## cause every fault and attack in a running exporter; rewrites docs/faults.md, review the diff
	$(PYTEST) tests/component/faults tests/component/attacks --update-golden

preview: $(VENV)/dev ## draw the status page and dashboards into out/, and check that each panel has data (needs chromium, npm)
	$(BIN)/python -m tests.preview.status_page
	$(BIN)/python -m tests.preview.dashboards

fuzz: $(VENV)/dev ## fuzz the parsers of foreign bytes, ten minutes each; not in CI (SECONDS=60 TARGETS=protobuf)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=2.3'
	$(BIN)/python -m tests.fuzz.run --seconds $(or $(SECONDS),600) $(TARGETS)

coverage: $(VENV)/dev ## list lines and branches that no unit test reaches, the worst files first; not in CI
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'coverage==7.*'
	COVERAGE_FILE=out/coverage $(BIN)/python -m coverage run --branch --source=exporter/gpu_exporter -m pytest -q tests/unit
	COVERAGE_FILE=out/coverage $(BIN)/python -m coverage report --skip-covered --show-missing --sort=cover

mutants: $(VENV)/dev ## list changed operators that no unit test detects; up to an hour, not in CI (ONLY=ledger/ledger.py,...)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'mutmut==3.8.*'
	$(BIN)/python -m tests.mutants.run $(ONLY)

rule-mutants: $(VENV)/dev testbed ## list changed rules that no case detects; an hour or two, not in CI (ONLY=hardware/,GpuLost)
	$(BIN)/python -m tests.rules.mutants $(ONLY)

bench: $(VENV)/dev ## compare memory, CPU, latency and age of values with nvitop-exporter and a floor, in one run
	$(BIN)/python -m tests.bench.peers

soak: $(VENV)/dev ## whether exporter and reconciler grow: a day at sixty times its speed, in 40 minutes or more (HOURS=24); needs root
	$(BIN)/python -m tests.bench.soak --hours $(or $(HOURS),24)

bench-hook: ## what the hook costs a training loop, in pairs with and without it
	@packages="$$($(PYTHON) -m tests.testbed.torch_env)" && PYTHONPATH="$$packages:exporter/hook:." $(PYTHON) -m tests.bench.hook

programs: $(VENV)/runtime ## build the Go servers for the tests into the cache, once (about 16 minutes on 2 cores)
	@$(BIN)/python tests/testbed/programs.py

programs-start: $(VENV)/runtime # build them in the background of the checks, which do not need them
	@nohup $(BIN)/python tests/testbed/programs.py >/dev/null 2>&1 &

testbed: ## install the Debian packages that the tests start; on other systems, list what is missing
	@tests/testbed/install

# --- For a release
gpu-check: $(VENV)/dev ## record the answers of this machine's driver and their latency (needs a GPU; not a test)
	$(BIN)/python -m tests.gpu_check

locks: $(VENV)/dev ## write exporter/locks anew: dependencies of the images, and the release's tools, with hashes
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	$(BIN)/python -m tools.locks

workflows: $(VENV)/dev ## check the workflows of .github with actionlint (needs Go) and zizmor
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'zizmor==1.32.*'
	go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 .github/workflows/*.yaml
	$(BIN)/zizmor --offline --min-severity=medium .github

packages-check: $(VENV)/dev testbed ## packages with an interpreter on a system without a Python: installed, used, upgraded, removed
	$(PYTEST) tests/release/test_packages_interpreter.py

hours-check: $(VENV)/dev testbed ## the hours of 60 Slurm jobs against sacct, four to seven minutes; needs root
	$(PYTEST) tests/release/test_slurm_record.py

release-dry-run: ## wheel, sdist, chart, images, SBOM and checksums in out/release, each used; publishes nothing
	@rm -rf out/release && PYTHONPATH=exporter $(PYTHON) -m tools.release
