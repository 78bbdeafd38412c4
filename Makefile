# Every target sets up what it needs, once, in .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longspan needs Python 3.11 or later, not " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'

# Tests and the demo start many processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-rest test-all slow attack mutate lint docs gpu wheel peers older clean

demo: .venv/demo.stamp
	$(BIN)/longspan demo --out demo

# The fast tier, for the edit loop. Nothing may follow pytest: its summary is the last line. One process for each
# processor that the system counts.
test: .venv/dev.stamp
	$(BIN)/python -m pytest -n logical --tier fast

# The other cases; continuous integration runs both.
test-rest: .venv/dev.stamp
	$(BIN)/python -m pytest -n logical --tier rest

test-all: .venv/dev.stamp
	$(BIN)/python -m pytest -n logical

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -m "slow or demo or inductor"

# What tries to break it: specs, configs, files, kills, states, planted bugs; about an hour on two cores.
attack: .venv/dev.stamp
	cd tests && ../$(BIN)/python -m attacks

# Fresh bugs in one module, and which of them its tests do not detect: make mutate MODULE=ops/prefix.py SEED=2 COUNT=50
SEED ?= 0
COUNT ?= 20
mutate: .venv/dev.stamp
	@test -n "$(MODULE)" || { echo "make mutate needs a module: make mutate MODULE=ops/prefix.py" >&2; exit 2; }
	cd tests && ../$(BIN)/python -m attacks.mutate $(MODULE) --seed $(SEED) --count $(COUNT) $(if $(TESTS),--tests $(TESTS))

lint: .venv/dev.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/pyright --project pyright.strict.json

docs: .venv/dev.stamp
	$(BIN)/sphinx-build -W -b html docs docs/_build

# On a machine with a CUDA GPU and torch: checks and measurements, within 9 minutes. It installs nothing.
gpu:
	$(PYTHON) lab/gpu.py

# For this system, with the kernels compiled; pip install needs no compiler then. Into dist/. Building needs no torch.
wheel: .venv-wheel/wheel.stamp
	LONGSPAN_PREBUILT=1 .venv-wheel/bin/python -m hatchling build -t wheel -d dist

# Other libraries for comparison, in a separate environment; the first compiles for some minutes.
peers: .venv-peers/peers.stamp

# The oldest supported transformers, and the versions in which its layers changed, each in a separate folder.
older: .venv/dev.stamp
	set -e; for version in 5.5.0 5.14.0 5.15.0 5.23.0; do \
	  $(BIN)/python -m pip install -q --upgrade --target .venv-older/$$version transformers==$$version; \
	  PYTHONPATH=.venv-older/$$version $(BIN)/python -m pytest -p no:cacheprovider tests/compat/test_hybrid_models.py \
	    tests/compat/test_hybrid_packing.py tests/compat/test_hybrid_swap.py tests/compat/test_attention_interface.py; \
	done

clean:
	rm -rf .venv .venv-peers .venv-older .venv-wheel dist docs/_build docs/jupyter_execute docs/reference/mechanisms docs/reference/mechanisms.md docs/reference/files.md docs/reference/cli.md docs/reference/configs.md .pytest_cache .ruff_cache

# Both distributions of this repository.
.venv/demo.stamp: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e . -e ./lab
	@touch $@

.venv/dev.stamp: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]" -e "./lab[reinforcement]"
	@touch $@

# Its setup imports torch, so torch comes first, in the version of constraints.txt, and is not hidden by build isolation;
# and it would compile for CUDA where it finds nvcc. The other one then finds what it needs.
.venv-peers/peers.stamp: constraints.txt benchmarks/peers-build.txt benchmarks/peers-compiled.txt benchmarks/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -c constraints.txt torch -r benchmarks/peers-build.txt
	path=$$(printf %s "$$PATH" | tr ':' '\n' | while read -r folder; do [ -e "$$folder/nvcc" ] || printf '%s:' "$$folder"; done); \
	CC=$$(command -v cc) CXX=$$(command -v c++) PATH="$$path" \
	.venv-peers/bin/python -m pip install --no-build-isolation --no-deps -r benchmarks/peers-compiled.txt
	.venv-peers/bin/python -m pip install -r benchmarks/peers.txt
	@touch $@

.venv-wheel/wheel.stamp: pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install "hatchling>=1.25" "auditwheel>=6.1; sys_platform == 'linux'"
	@touch $@

$(BIN)/python:
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
