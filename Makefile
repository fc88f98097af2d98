# make demo   install into .venv and run the appliance on two synthetic cameras (Ctrl-C stops it)
# make test   install with the test tools and run the tests (WORKERS=0: in one process)
# make check  the tests, then format, lint, types and layers: what CI runs

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
DEMO_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

.PHONY: demo test check lint venv clean

demo: $(VENV)/.installed
	@$(BIN)/appliance demo --config configs/demo.yaml $(DEMO_ARGS)

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest \
	  -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

check: test lint

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(VENV)/.installed-test

$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with venv was found: install python3 and python3-venv, or say make PYTHON=/path/to/python3" >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing the packages into $(VENV): some minutes the first time, nothing after that."
	$(PIP) install -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
