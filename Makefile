# make demo | make test | make docs | make lint | make install
# Needs Python 3.11+ and make. Everything lands in .venv; a second call does nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# loadfile keeps the tests of a file in one process: what they share (a model, a local Ray) is made once. The files go
# out in the order of tests/conftest.py, the long ones first.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: install demo test test-lowest test-newest sbom docs lint format clean

install: $(VENV)/.demo $(VENV)/.test

$(BIN)/uv:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "usfan needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv

# Each command installs its own extra of pyproject.toml, and nothing more.
$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt Makefile | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[$*]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/usfan demo

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The suite at the lower bounds of pyproject.toml, and on the newest Python with the newest of everything.
# Old packages warn of what newer ones, which they themselves need, deprecate: that is no error at the lower bounds.
LOWEST := .venv-lowest
NEWEST := .venv-newest
NEWEST_PYTHON ?= python3.13

test-lowest: $(BIN)/uv
	test -x $(LOWEST)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[test]'
	$(LOWEST)/bin/python -m pytest $(PYTEST_ARGS) -W ignore::DeprecationWarning

test-newest: $(BIN)/uv
	test -x $(NEWEST)/bin/python || $(BIN)/uv venv --quiet --python $(NEWEST_PYTHON) $(NEWEST)
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --resolution highest --upgrade -e '.[test]'
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS)

# What is installed with the package, as CycloneDX JSON: SBOM=FILE says where.
SBOM ?= build/sbom.json
sbom: $(VENV)/.test
	$(BIN)/python tests/reliability/sbom.py $(SBOM)

# The site, in build/site. A broken link or reference is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
