# Every target sets up what it needs, once, in .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow lint docs clean

demo: .venv/demo.stamp
	$(BIN)/longspan demo --out demo

# Nothing may follow pytest: its summary is the last line.
test: .venv/dev.stamp
	$(BIN)/python -m pytest

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -m "slow or demo or inductor"

lint: .venv/dev.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

docs: .venv/docs.stamp
	$(BIN)/sphinx-build -W -b html docs docs/_build

clean:
	rm -rf .venv docs/_build docs/mechanisms.md .pytest_cache .ruff_cache

.venv/%.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e ".[$*]"
	@touch $@

# Together with dev, which says which torch.
.venv/docs.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install -e ".[dev,docs]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longspan needs Python 3.11 or later, not " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
