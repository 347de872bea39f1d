# Each of `make demo` and `make test` sets everything up by itself on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest
HERE   := not gpu and not nvme and not bench and not quiet and not long
# Real runs on a machine that others use may be held up: what failed is tried once more, by itself, in a
# new process. What is wrong fails again.
AGAIN   = { echo "once more, one at a time: what failed above"; \
            $(PYTEST) -m "$(HERE) and $(1)" --last-failed --last-failed-no-failures none; }
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test check test-long test-quiet test-nvme bench clean

help:
	@echo "make demo      train a small GPT on 2 processes, watched; then print its report"
	@echo "make test      everything CI checks: format, lint, types, imports, tests"
	@echo "make check     the same without the tests that train"
	@echo "make test-long more variants of the same: 4 ranks, other launchers, 50 kills"
	@echo "make test-quiet what holds times to a limit, on a machine that nobody else uses"
	@echo "make test-nvme ZeRO-Infinity on a real disk: compiles for 4 minutes, needs libaio-dev"
	@echo "make bench     ratios: cost of hooks, of a step, of the collector"

# torch first, from the CPU build that is pinned here: a dependency would pull gigabytes of CUDA.
# DeepSpeed's setup imports torch, and what it imports besides is in the `dev` extra.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 numpy
	$(PIP) -c constraints.txt -e '.[dev]'
	DS_BUILD_OPS=0 $(PIP) -c constraints.txt --no-build-isolation deepspeed
	touch $(READY)

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=agents:dashboard $(BIN)/lint-imports
	$(PYTEST) tests/core tests/cli tests/tui tests/dashboard --ignore tests/dashboard/test_browser.py \
	  --numprocesses 2 --dist loadfile

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=agents:dashboard $(BIN)/lint-imports
	$(PYTEST) -m "$(HERE) and not alone" --numprocesses 2 --dist loadfile || $(call AGAIN,not alone)
	$(PYTEST) -m "$(HERE) and alone" || $(call AGAIN,alone)

test-long: $(READY)
	$(PYTEST) -m long

test-quiet: $(READY)
	$(PYTEST) -m quiet

test-nvme: $(READY)
	@echo '#include <libaio.h>' | $(CXX) -fsyntax-only -x c++ - 2>/dev/null \
	  || { echo "libaio.h is missing: apt-get install libaio-dev" >&2; exit 2; }
	$(PYTEST) -m nvme -s tests/nvme

bench: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/bench/run.py

clean:
	rm -rf $(VENV) .nvme-build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
