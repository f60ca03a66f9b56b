# Each target makes the environment that it needs, and again when pyproject.toml has changed.
#   PYTHON=…        another Python than the one .ci/find-python finds
#   VENV=…          another folder than .venv
#   PYTEST_ARGS=…   as `make test PYTEST_ARGS="-k remat"`; likewise DEMO_ARGS, BENCH_ARGS
# JAX_COMPILATION_CACHE_DIR, set outside, lets JAX keep compiled programs between runs. It is unset
# by default: some tests read figures off a compiled program, which must come from the compiler.

VENV ?= .venv
NEWEST_VENV ?= .venv-newest
PYTEST_ARGS ?= -n 2 --dist worksteal
# Checks the annotations at run time, which takes a third of a run: not for every one.
TYPED = --jaxtyping-packages=funcgrad,beartype.beartype

PY = $(VENV)/bin/python
NEWEST_PY = $(NEWEST_VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-deep test-newest bench bench-peers lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed ## per-sample gradients and private training on real digits
	$(PY) -m funcgrad demo $(DEMO_ARGS)

test: $(VENV)/.installed ## all tests, doctests and examples
	$(PY) -m pytest $(PYTEST_ARGS)

test-deep: $(VENV)/.installed ## the same, with many more generated programs and with types checked
	FUNCGRAD_DEEP=1 $(PY) -m pytest $(TYPED) $(PYTEST_ARGS)

test-newest: $(NEWEST_VENV)/.installed ## on the newest Python and JAX, types checked, without torch
	$(NEWEST_PY) -m pytest $(TYPED) $(PYTEST_ARGS)

bench: $(VENV)/.installed ## compare with other ways, in time and memory
	$(PY) -m funcgrad bench $(BENCH_ARGS)

# Without their dependencies, most of which are here already: theirs would bring torch with CUDA.
PEERS = opacus backpack-for-pytorch jax-privacy
PEERS_NEED = chex toolz opt_einsum einops einshape unfoldnd
bench-peers: $(VENV)/.installed ## install the libraries that bench compares with; absent otherwise
	$(PY) -m pip install --no-deps $(PEERS) $(PEERS_NEED)

lint: $(VENV)/.installed ## ruff and pyright
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.installed ## let ruff fix and format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean: ## remove the environments and all that is generated
	rm -rf $(VENV) $(NEWEST_VENV) build dist funcgrad-demo funcgrad-bench
	rm -rf .pytest_cache .ruff_cache .hypothesis examples/_out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Dependency groups need pip 25.1, newer than the one that Python 3.11 brings.
REQUIREMENTS = --editable ".[bench,dp]" --group dev

$(VENV)/.installed: pyproject.toml
	@echo "Making $(VENV): some minutes, the first time"
	@$(PY) -m pip --version >/dev/null 2>&1 || \
	{ python=$$(.ci/find-python base) && "$$python" -m venv --clear $(VENV); }
	@$(PY) -m pip install -qq --upgrade "pip>=25.1"
	@$(PY) -m pip install -qq $(REQUIREMENTS)
	@$(PY) -m pip install -qq --group torch || \
	echo "Going on without torch, whose CPU build is not found: what compares with it is skipped"
	@touch $@

$(NEWEST_VENV)/.installed: pyproject.toml
	@echo "Making $(NEWEST_VENV): some minutes, the first time"
	@$(NEWEST_PY) -m pip --version >/dev/null 2>&1 || \
	{ python=$$(.ci/find-python newest) && "$$python" -m venv --clear $(NEWEST_VENV); }
	@$(NEWEST_PY) -m pip install -qq --upgrade "pip>=25.1"
	@$(NEWEST_PY) -m pip install -qq --upgrade --upgrade-strategy eager $(REQUIREMENTS)
	@touch $@
