# make demo   installs treegraft into .venv and runs the main job on the embedded models
# make test   installs what tests need into .venv and runs them
# make lint   the same for style and types
#
# PYTHON=python3.12 picks another interpreter (3.11 or newer). Without a GPU, torch's much smaller CPU build will do:
# make demo TORCH_FLAGS="--index-url <the index of CPU wheels that PyTorch's installation page names>"

PYTHON ?= python3
TORCH_FLAGS ?=
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test lint clean

demo: .venv/installed
	$(BIN)/treegraft demo

test: .venv/testing
	$(BIN)/python -m pytest --numprocesses auto

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv

# torch first and by itself: TORCH_FLAGS are for it alone.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("PYTHON=... must be 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH_FLAGS) torch
	$(INSTALL) --editable .
	touch $@

.venv/testing: .venv/installed
	$(INSTALL) --editable '.[testing,bench,gguf]'
	touch $@

.venv/dev: .venv/testing
	$(INSTALL) --editable '.[dev]'
	touch $@
