# Each target sets up what it needs on a fresh machine: `make demo` and `make test` stand alone.

PYTHON ?= python3
# The version the suite last passed with.
TORCH ?= torch==2.13.0
SLOW ?= not slow

BIN := .venv/bin
TORCH_INSTALLED := .venv/$(subst =,-,$(TORCH))

.PHONY: test demo check matrix bench clean

test: .venv/installed check
	$(BIN)/pytest -m "$(SLOW)"

# Types are checked on the package as a user installs it, where kernels/ is part of it.
check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build .venv/package
	$(BIN)/pip install --quiet --no-deps --target .venv/package .
	cd .venv/package && ../bin/mypy --config-file ../../pyproject.toml

demo: .venv/installed
	$(BIN)/python -m syncbn_triton.demo

# Every pair of versions that installs here; MATRIX="--torch 2.13 --triton 3.8" narrows it.
matrix: .venv/installed
	$(BIN)/python bench/matrix.py $(MATRIX)

# Ratios to nn.BatchNorm beside the saved ones; BENCH="-k host" narrows it. No time can fail. Freed
# memory is kept, or page faults would be timed with whoever meets them.
bench: .venv/installed
	mkdir -p bench/results
	env -u TRITON_INTERPRET MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 \
		$(BIN)/pytest bench --benchmark-json=bench/results/bench.json \
		--benchmark-max-time=0.5 --benchmark-columns=min,median,iqr $(BENCH)
	$(BIN)/python bench/baseline.py bench/results/bench.json

.venv/installed: $(TORCH_INSTALLED) pyproject.toml Makefile
	$(BIN)/pip install --quiet --editable ".[test]" "$(TORCH)"
	touch $@

$(TORCH_INSTALLED):
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	touch $@

clean:
	rm -rf .venv .matrix build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
