# Each target sets up what it needs on a fresh machine: `make demo` and `make test` stand alone.

PYTHON ?= python3
# The version the suite last passed with.
TORCH ?= torch==2.13.0
BIN := .venv/bin
TORCH_INSTALLED := .venv/$(subst =,-,$(TORCH))
SOURCES := pyproject.toml $(shell find syncbn_triton kernels -name '*.py' -o -name '*.json')
SLOW ?= not slow

.PHONY: test demo check clean

test: .venv/installed check
	$(BIN)/python -m pytest -m "$(SLOW)"

check: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	cd tests && ../$(BIN)/mypy --config-file ../pyproject.toml

demo: .venv/installed
	$(BIN)/python -m syncbn_triton.demo

# The package is installed as a user installs it; a change to it, or another TORCH, installs anew.
.venv/installed: $(TORCH_INSTALLED) $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --upgrade ".[test]" "$(TORCH)"
	touch $@

$(TORCH_INSTALLED):
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
