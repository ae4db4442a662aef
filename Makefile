# make demo | make test | make docs | make lint | make install
# Needs Python 3.11+ and make. Everything lands in .venv; a second call does nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := demo,offline,onnx,test,lint,docs
# loadfile keeps the tests of a file in one process: what they share (a model, a local Ray) is made once.
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: install demo test test-lowest test-newest sbom docs lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "usfan needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: install
	$(BIN)/usfan demo

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The suite at the lower bounds of pyproject.toml, and on the newest Python with the newest of everything.
# Old packages warn of what newer ones, which they themselves need, deprecate: that is no error at the lower bounds.
LOWEST := .venv-lowest
NEWEST := .venv-newest
NEWEST_PYTHON ?= python3.13
OTHER_EXTRAS := demo,offline,onnx,test

test-lowest: install
	test -x $(LOWEST)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[$(OTHER_EXTRAS)]'
	$(LOWEST)/bin/python -m pytest $(PYTEST_ARGS) -W ignore::DeprecationWarning

test-newest: install
	test -x $(NEWEST)/bin/python || $(BIN)/uv venv --quiet --python $(NEWEST_PYTHON) $(NEWEST)
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --resolution highest --upgrade -e '.[$(OTHER_EXTRAS)]'
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS)

# What is installed with the package, as CycloneDX JSON: SBOM=FILE says where.
SBOM ?= build/sbom.json
sbom: install
	$(BIN)/python tests/reliability/sbom.py $(SBOM)

# The site, in build/site. A broken link or reference is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
