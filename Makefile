# What a newcomer needs: `make demo` and `make test`. CONTRIBUTING.md explains the rest.
PYTHON ?= python3
VENV   ?= .venv
BUNDLE ?= bundles/qwen2.5-coder-int4
BIN    := $(VENV)/bin

# torch for CPUs alone is a tenth of the download. Where its index does not answer at once, pip takes the usual one.
TORCH_INDEX = $(shell curl -m 5 -sfIo /dev/null https://download.pytorch.org/whl/cpu/ 2>/dev/null && \
                      echo --extra-index-url https://download.pytorch.org/whl/cpu)
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_INDEX)

.PHONY: demo bundle test check lint test-models runtime-size clean

## demo: install, fetch and export the pair Qwen2.5-Coder 1.5B + 0.5B, answer three prompts, measure
demo: $(VENV)/installed
	@$(BIN)/paceline info $(BUNDLE) >/dev/null 2>&1 || $(MAKE) --no-print-directory bundle
	$(BIN)/paceline demo $(BUNDLE)

## bundle: fetch and export the pair anew
bundle: $(VENV)/installed
	$(BIN)/paceline fetch qwen2.5-coder
	$(BIN)/paceline export --target qwen2.5-coder --precision int4 -o $(BUNDLE) --overwrite

## test: install, then linters, types and tests
test: check
	$(BIN)/pytest -n 2 --dist loadfile

## check, lint: linters and types alone
check lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

## test-models: the tests that need the Qwen pair (fetches and exports it; many minutes)
test-models: $(VENV)/installed-dev
	$(BIN)/pytest -m model

## runtime-size: size of the environment that `import paceline` needs
runtime-size:
	PYTHON=$(PYTHON) tools/runtime_size.sh

## clean: remove the environment and all caches; bundles and fetched checkpoints stay
clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find export runtime tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is expected: make PYTHON=python3.11 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[cpu,export,tools]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) -e '.[cpu,export,tools,dev]'
	@touch $@
