# Each of `make demo` and `make test` sets everything up by itself on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Where DeepSpeed compiles an operator of its CPU backend, once: a test that is killed while it compiles
# would leave a lock for which every later one waits.
COMPILED := TORCH_EXTENSIONS_DIR="$(CURDIR)/$(VENV)/torch_extensions"
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(COMPILED) $(BIN)/python -m pytest
HERE   := not nvme and not bench and not quiet and not long and not vgpu
SLOWEST := --durations 20 --durations-min 1
# The files that have a test which must be alone: collecting all others takes ten seconds.
ALONE   = $(shell grep -rl --include 'test_*.py' 'pytest.mark.alone' tests)
READY  := $(VENV)/.ready
SITE   := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
COMPILED_OP := $(VENV)/.compiled
HOOKS  := $(VENV)/.hooks
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# uv installs in half a minute what takes pip five. It reads no configuration of pip: what that says of
# where packages are is handed on.
CONFIG  = $(PIP) config get global.$(1) 2>/dev/null
INDEX   = i="$${PIP_INDEX_URL:-$$($(call CONFIG,index-url))}"; [ -z "$$i" ] || echo "UV_DEFAULT_INDEX=$$i"
UV_ENV := env UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$($(call CONFIG,find-links))}" $$($(INDEX))
UV     := $(UV_ENV) $(BIN)/uv pip install --quiet --python $(BIN)/python

# Where this is set, as in an image, each process compiles torch anew: half of the CPU time of all tests.
unexport PYTHONDONTWRITEBYTECODE

VERSIONS ?= 2.6.0 2.9.1 2.11.0 2.13.0 2.15.0

# Cases of broken input, of all kinds together: 15 minutes.
FUZZ ?= 1000000

# Versions of torch for the virtual device.
VGPU ?= 2.13.0

# What the programs of others need besides, over what is installed here.
PROGRAMS ?= $(CURDIR)/.programs
ONLY     ?=
# Where the libraries of experiment trackers are installed for their tests.
TRACKERS ?= $(CURDIR)/.trackers

.PHONY: help demo test beside together alone static check test-long test-soak test-matrix test-quiet test-nvme test-torch test-programs test-trackers vgpu test-vgpu test-vgpu-short truth-table recordings bench bench-peers docs release clean

help:
	@echo "make demo      train a small GPT on 2 processes, watched; then print its report"
	@echo "make test      everything CI checks: format, lint, types, imports, tests"
	@echo "make check     the same without the tests that train"
	@echo "make test-long more variants: 4 ranks, other launchers, a million broken inputs; 200 drawn faults (2 hours)"
	@echo "make test-soak memory and descriptors of 8 ranks and of what watches them: HOURS=6; build/soak.jsonl"
	@echo "make test-quiet what holds times to a limit, on a machine that nobody else uses"
	@echo "make test-nvme ZeRO-Infinity on a real disk: compiles for 4 minutes, needs libaio-dev"
	@echo "make test-torch the agents' tests on other versions of torch, 6 GB each: VERSIONS=\"2.6.0 2.15.0\""
	@echo "make test-matrix the core on each Python here, with its oldest and newest dependencies: 10 minutes"
	@echo "make test-programs Trainer, accelerate, trl, Lightning, torchtune with and without zeromon: ONLY=\"hf trl\""
	@echo "make test-trackers a live run in W&B, MLflow and TensorBoard, by their own libraries; manifests against schemas"
	@echo "make test-gpu  what only a GPU can show; PART=1, PART=2, ROWS=1,7; DRY=1 runs it without one"
	@echo "make bench-gpu the same for the cost of a step, overlap, NVML; make gpu-wheels: what travels there"
	@echo "make vgpu      a CUDA device without a GPU: the CUDA build of torch and Triton, 1.9 GB, on our own libraries; VGPU=\"2.13.0 2.15.0\""
	@echo "make test-vgpu the tests on it; make test-vgpu-short: a minute of them, which CI runs"
	@echo "make truth-table zeromon's figures beside the virtual device's timeline: half an hour, goes on where it was cut"
	@echo "make recordings  train anew what tests/data/rings and tests/data/runs hold, as root, on a machine that nobody else uses"
	@echo "make bench     what zeromon costs, in 20 minutes, as build/bench.json; tests/bench/run.py --compare A B"
	@echo "make bench-peers the same beside other tools, which it installs"
	@echo "make docs      the documentation as a site, in build/site; a broken link is an error"
	@echo "make release KEY=you@example.org   the checks of a release, dist/ signed by this GPG key, and the tag; nothing is uploaded"

# torch first, from the CPU build that is pinned here: a dependency would pull gigabytes of CUDA.
# DeepSpeed's setup imports torch, and what it imports besides is in the `dev` extra.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt uv
	$(UV) torch==2.13.0 numpy
	$(UV) -c constraints.txt -e '.[dev]'
	DS_BUILD_OPS=0 $(UV) -c constraints.txt --no-build-isolation deepspeed
	touch $(READY)

# The agent's hooks in C, in place: an editable installation has them only so.
$(HOOKS): $(READY) agents/zeromon_agents/runtime/compiled_hooks.c tools/compiled.py
	$(BIN)/python tools/compiled.py --hooks
	touch $(HOOKS)

# What DeepSpeed's CPU backend compiles at its first use, beside the checks that need one core.
$(COMPILED_OP): $(READY)
	-PATH="$(CURDIR)/$(BIN):$$PATH" $(COMPILED) DS_ACCELERATOR=cpu $(BIN)/python -c \
	  "from deepspeed.comm.torch import build_shm_op; build_shm_op()" >/dev/null 2>&1
	touch $(COMPILED_OP)

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

static: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=agents:dashboard $(BIN)/lint-imports
	$(SITE)

docs: $(READY)
	$(SITE)

check: static
	$(PYTEST) tests -m "$(HERE) and not alone and not trains" --ignore tests/agents --ignore tests/runs --ignore tests/nodes \
	  --ignore tests/dashboard/test_browser.py --ignore tests/export/grafana --ignore tests/sources/prometheus/test_source.py \
	  --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The static checks take the CPU time that tests leave: three workers often wait for what they have started.
test: $(READY) $(HOOKS)
	@mkdir -p build
	$(MAKE) --no-print-directory --jobs 2 --keep-going beside together; result=$$?; \
	  $(MAKE) --no-print-directory alone && exit $$result

beside:
	nice -n 19 $(MAKE) --no-print-directory static > build/static.txt 2>&1 || { cat build/static.txt; exit 1; }

together: $(COMPILED_OP) $(HOOKS)
	$(PYTEST) -m "$(HERE) and not alone" --numprocesses 3 --dist loadfile --no-loadscope-reorder $(SLOWEST)

alone:
	$(PYTEST) $(ALONE) -m "$(HERE) and alone" $(SLOWEST)

test-long: $(COMPILED_OP) $(HOOKS)
	$(UV_ENV) $(PYTEST) -m long
	ZEROMON_FUZZ_CASES=$(FUZZ) $(PYTEST) tests/fuzz

HOURS ?= 6
test-soak: $(READY) $(HOOKS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/long/soak.py --hours $(HOURS)

test-matrix: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(UV_ENV) $(BIN)/python tests/matrix.py

test-quiet: $(READY) $(HOOKS)
	$(PYTEST) -m quiet

test-nvme: $(READY)
	@echo '#include <libaio.h>' | $(CXX) -fsyntax-only -x c++ - 2>/dev/null \
	  || { echo "libaio.h is missing: apt-get install libaio-dev" >&2; exit 2; }
	$(PYTEST) -m nvme -s tests/nvme

test-torch: $(READY)
	$(UV_ENV) $(BIN)/python tests/torch_versions.py $(VERSIONS)

test-programs: $(COMPILED_OP) $(HOOKS)
	$(COMPILED) $(BIN)/python tests/programs/others/run.py --environment "$(PROGRAMS)" $(ONLY)

# 400 MB over what is installed here, where mlflow would replace other packages.
test-trackers: $(READY)
	$(BIN)/python -m venv --without-pip $(TRACKERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$(echo $(TRACKERS)/lib/python3*/site-packages)/project.pth"
	$(UV_ENV) $(BIN)/uv pip install --quiet --python $(TRACKERS)/bin/python 'wandb>=0.20' 'mlflow-skinny>=2.10' tensorboard \
	  kubernetes-validate cloudcoil-models-prometheus-operator kubeflow-trainer-api
	$(TRACKERS)/bin/python -m pytest -m 'long or not long' tests/export/test_live_trackers.py tests/export/test_exports.py \
	  tests/agents/observe/test_trackers.py tests/runs/test_tracked.py tests/cli/test_kubernetes.py $(SLOWEST)

# A machine with a GPU may have no network: then its own Python runs the suite, with the wheels that travel.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_SITE   = $(CURDIR)/build/gpu-site
OUT       ?= build/gpu
test-gpu: PART ?= all
bench-gpu: PART = bench
test-gpu bench-gpu:
	@$(GPU_PYTHON) -c 'import msgspec' 2>/dev/null || for wheel in .gpu-wheels/*.whl; do \
	  [ ! -f $$wheel ] || $(GPU_PYTHON) -m zipfile -e $$wheel $(GPU_SITE); done
	PYTHONPATH=$(CURDIR):$(CURDIR)/agents:$(GPU_SITE) $(GPU_PYTHON) tests/gpu/suite.py --part $(PART) --out $(OUT) \
	  $(if $(ROWS),--rows $(ROWS)) $(if $(DRY),--dry)

# For Python 3.12 on x86-64, less than a megabyte. polars would be 54 MB: the suite reads no step history.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --dest .gpu-wheels $$(grep '^msgspec==' constraints.txt)

vgpu: $(READY)
	$(BIN)/python tests/vgpu/environment.py --triton $(VGPU)

test-vgpu: VGPU = 2.9.1 2.13.0 2.15.0
test-vgpu: vgpu
	$(PYTEST) -m vgpu tests/vgpu $(SLOWEST)

# Every strategy, device-bound and launch-bound, beside the device's timeline: docs/evidence/accuracy.md.
truth-table: VGPU = 2.13.0 2.15.0
truth-table: vgpu
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/vgpu/truth_table.py 2.13.0:2 2.13.0:4 2.15.0:2 2.15.0:4; \
	  $(BIN)/python tests/vgpu/truth_table.py --publish build/truth.jsonl

# Without Triton: none of these tests compiles.
test-vgpu-short: $(READY) $(HOOKS)
	$(BIN)/python tests/vgpu/environment.py $(VGPU)
	$(PYTEST) -m "vgpu and short" tests/vgpu --numprocesses 3 --dist load  # they wait for the device

recordings: $(READY) $(HOOKS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/recordings.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/watched_runs.py

bench: $(READY) $(HOOKS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/bench/run.py -o build/bench.json

bench-peers: $(READY) $(HOOKS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/bench/run.py --peers -o build/bench-peers.json

# The version is that of zeromon/__init__.py; the changelog has a part for it. KEY: your GPG key. What is
# published then: the tag v0.1.0 (git push --tags) and the files in dist/ (uv publish).
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
release: $(READY)
	@[ -n "$(KEY)" ] || { echo "make release KEY=you@example.org: the GPG key that signs dist/SHA256SUMS and the tag" >&2; exit 2; }
	@[ -z "$$(git status --porcelain)" ] || { echo "there are changes that are not committed" >&2; exit 2; }
	@grep "^## $$($(BIN)/zeromon --version | cut -d' ' -f2)" CHANGELOG.md || { echo "no part of this version in CHANGELOG.md" >&2; exit 2; }
	$(MAKE) --no-print-directory test
	$(UV_ENV) $(PYTEST) -m long tests/test_wheel.py
	rm -rf dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(UV_ENV) $(BIN)/python tools/release.py --sign "$(KEY)" --pythons $(PYTHONS)
	$(UV_ENV) $(BIN)/uv tool run twine check --strict dist/*.whl dist/*.tar.gz
	version=$$($(BIN)/zeromon --version | cut -d' ' -f2); git tag --local-user "$(KEY)" --message "zeromon $$version" "v$$version"

clean:
	rm -rf $(VENV) .programs .trackers .nvme-build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
