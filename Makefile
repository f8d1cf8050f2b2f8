# Thin: each target is one or two commands that also work by hand. The environment is `.venv` here at the root.
# Another interpreter: make PYTHON=python3.12 test. Other pytest flags: make test TESTS="plugins/losses -k nll".
PYTHON ?= python3
WORKERS ?= 3
TESTS ?=
TWINKLE_MEMORY_LIMIT ?= 4GB
BIN := .venv/bin
# Modules are compiled when they are first imported: compiling all of them would take most of the installation.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# Hundreds of processes are started, also where the environment forbids bytecode: each would compile the code again.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
PACKAGES := $(notdir $(wildcard registry/src/twinkle* twinkle_core/src/twinkle* hub/src/twinkle* plugins/*/src/twinkle* server/src/twinkle* server/client/src/twinkle* templates/src/twinkle*))
SETTINGS := requirements.txt constraints.txt $(wildcard registry/pyproject.toml twinkle_core/pyproject.toml hub/pyproject.toml plugins/*/pyproject.toml server/pyproject.toml server/client/pyproject.toml templates/pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help install quickstart serve-demo grpo-demo test test-all browser soak gpu lint format bench docs clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

install: .venv/installed  ## Make .venv (1.8 GB) with all members editable; again only when requirements change

# Passive: threads that wait give their core away, which matters by a factor where others compute too. Each process of a
# demo plans its passes for the memory that TWINKLE_MEMORY_LIMIT names: where a fast path is off, they are smaller.
DEMO := OMP_WAIT_POLICY=PASSIVE TWINKLE_MEMORY_LIMIT=$(TWINKLE_MEMORY_LIMIT) $(BIN)
quickstart: .venv/members  ## Train a small real model on two CPU cores, in minutes
	$(DEMO)/twinkle run sft --config examples/quickstart.yaml
	@run=$$(ls -td runs/sft-*/ | head -1); echo; \
	echo "See the loss:        $${run}loss.png"; \
	echo "Ask the result:      OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/ask.py $${run}adapter 'Who are you?'"; \
	echo "Learn from rewards:  make grpo-demo"

serve-demo: install  ## Train two tenants at once through a service, with a live table, in minutes
	$(DEMO)/python examples/serve_demo.py

grpo-demo: .venv/members  ## Let a small real model learn to add from rewards alone, in a quarter of an hour
	$(DEMO)/twinkle run grpo --config examples/grpo_demo.yaml

# Of tests that are named, the slow ones run as well.
test: install  ## Run the tests, or with TESTS= those that it names
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not gpu and not soak and not browser$(if $(TESTS),, and not full)" $(TESTS)

test-all: install  ## Run the tests that take long, then the numeric ones as other processors compute them
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "full and not gpu and not soak and not browser"
	$(BIN)/python scripts/instruction_sets.py

browser: install  ## Run the tests of the dashboard in a headless Chromium, which apt installs where it is missing
	@command -v chromium >/dev/null || { sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); $$sudo apt-get install -y --no-install-recommends chromium; }
	$(PYTEST) -m browser $(if $(TESTS),$(TESTS),server/tests/dashboard)

soak: install  ## Run the tests with larger numbers
	$(PYTEST) -m soak $(TESTS) || [ $$? -eq 5 ]  # 5: there are none
	$(BIN)/python scripts/instruction_sets.py --all

gpu: install  ## Run the tests and benchmarks that need an accelerator
	$(PYTEST) -m gpu $(TESTS)
	@set -e; for script in $(wildcard benchmarks/gpu/[a-z]*.py); do (set -x; $(BIN)/python $$script); done

lint: install  ## Check format, style, types, layers and the rules of the repository
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/rules.py

format: install  ## Format the code, mend what ruff can mend, renew generated blocks
	$(BIN)/python scripts/type_stubs.py
	$(BIN)/python scripts/own_index.py
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: install  ## Run the benchmarks of this machine, about 40 minutes
	$(PIP) -r requirements-bench.txt -c constraints.txt
	@export OMP_NUM_THREADS=1; failed=; for script in $(wildcard benchmarks/[a-z]*.py); do \
		(set -x; $(BIN)/python $$script) || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "a goal was missed in:$$failed"; exit 1; }

docs: install  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove what the tools left; .venv and runs stay
	rm -rf site dist build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

.venv/members: $(SETTINGS)
	@command -v $(PYTHON) >/dev/null || { echo "Twinkle needs Python 3.11 or newer; there is no '$(PYTHON)' here. Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Twinkle needs Python 3.11 or newer; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "Making .venv: about 1.8 GB, of which torch is the most, in one to three minutes. pip is silent meanwhile."
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip hatchling editables -c constraints.txt
	$(PIP) --no-build-isolation -r requirements.txt -c constraints.txt
	$(BIN)/twinkle plugins types > /dev/null  # stubs for editors and mypy
	@touch $@

.venv/installed: .venv/members requirements-dev.txt requirements-cookbook.txt
	@echo "Adding the tools of developers to .venv: tests, linters, documentation, the clients that are tested."
	$(PIP) -r requirements-dev.txt -r requirements-cookbook.txt -c constraints.txt
	$(PIP) --no-deps tinker-cookbook -c constraints.txt
	@touch $@
