# What a user and CI run. Needs Python 3.11 or newer, g++, make and perl; everything else comes from PyPI into .venv.

# The first Python on PATH that is new enough; PYTHON=... names another.
PYTHON ?= $(or $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$name && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest
# How long each test took: `build/tests.xml` has all of them, and the log has the longest and the sums of folders.
TIMES := --durations 40 --durations-min 5 --junitxml build/tests.xml
# A test that hangs ends its process, which prints where it stands, and has failed; the others go on.
HANGS := -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true

.PHONY: help docs demo demo-generate torch test thorough check lint types unit bench figures paper bench-cpu bench-tune \
	bench-explore bench-hw fuzz fuzz-schedules prove mutants \
	post-synthesis release format clean

help:  ## Print this.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(INSTALLED)  ## Classify images on the RTL simulator.
	@$(BIN)/celosia demo

demo-generate: $(INSTALLED)  ## Write text with a small decoder on the RTL simulator.
	@$(BIN)/celosia generate models/gpt_topics_int8.onnx --prompt "The for statement " --temperature 0.7 --seed 2 --device rtl

torch: $(VENV)/.torch  ## Install PyTorch beside the rest, some GB; `make test` tests it from then on.

test: lint types unit  ## Everything that CI runs.

thorough: $(INSTALLED)  ## More cases of what `make test` tests, and five times the examples of its property tests.
	$(PYTEST) -n $(JOBS) --dist worksteal -q -m thorough
	CELOSIA_EXAMPLES=5 $(PYTEST) -n $(JOBS) --dist worksteal -q -m "(hypothesis or rtl) and not thorough"

check: lint types $(INSTALLED)  ## Lint, types and the quick tests.
	$(PYTEST) -n $(JOBS) --dist loadfile -q -m "not rtl and not thorough" --ignore tests/hw

unit: $(INSTALLED)
	$(PYTEST) -n $(JOBS) --dist worksteal -q -m "not thorough" $(TIMES) $(HANGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)  ## Build the site of docs/ to build/site; it needs no server.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

bench: $(INSTALLED)  ## Measure; prints a table, and writes the figures that README and docs quote.
	$(BIN)/python -m benchmarks

figures: $(INSTALLED)  ## Measure quoted figures that are not current, the cheapest first; CELOSIA_MODELS names networks.
	@$(BIN)/python -m benchmarks figures --measure

paper: $(INSTALLED)  ## Measure what papers show, side by side, and draw it: bench/paper.html and docs/; SHORT=1 takes minutes.
	$(BIN)/python -m benchmarks paper $(if $(SHORT),--short)

bench-cpu: $(INSTALLED)  ## Measure the CPU backend beside onnxruntime, on one thread.
	$(BIN)/python -m benchmarks cpu

bench-tune: $(INSTALLED)  ## Measure searches for schedules of layers and of CPU kernels; FULL=1 takes hours.
	$(BIN)/python -m benchmarks tune tune_cpu $(if $(FULL),--full)

bench-explore: $(INSTALLED)  ## Measure the search for Configs; FULL=1 takes hours, CELOSIA_MODELS names networks.
	$(BIN)/python -m benchmarks explore $(if $(FULL),--full)

bench-hw: $(INSTALLED)  ## Proofs, fuzzing, resources of presets on boards, clock on an ECP5: an hour the first time.
	$(BIN)/python -m benchmarks hardware

N ?= 2000
SEED ?= 1
fuzz: $(INSTALLED)  ## Random programs, garbage and damaged files on random Configs; N=20000 SEED=1.
	PYTHONPATH=tests:tests/cosim $(BIN)/python -m fuzz --count $(N) --seed $(SEED) --jobs $(JOBS)

fuzz-schedules: $(INSTALLED)  ## Random schedules on LLVM beside numpy, of a fresh seed; N=10000 SEED=1.
	PYTHONPATH=tests $(BIN)/python -m random_schedules $(if $(filter file,$(origin N)),,--count $(N)) \
		$(if $(filter file,$(origin SEED)),,--seed $(SEED)) --jobs $(JOBS)

mutants: N := 300
mutants: $(INSTALLED)  ## Random faults in the hardware, and what finds them: hours; goes on where it was. N=300 SEED=1.
	PYTHONPATH=tests:tests/formal:tests/cosim $(BIN)/python -m mutation --count $(N) --seed $(SEED)

prove: $(INSTALLED)  ## Prove the hardware's properties, each with faults that it must find.
	PYTHONPATH=tests/formal $(BIN)/python -m proofs --jobs $(JOBS)

post-synthesis: $(INSTALLED)  ## Simulate the netlist of `tiny`, cell by cell, beside the RTL: half an hour the first time.
	PYTHONPATH=tests $(PYTEST) -q tests/bitstreams/post_synthesis.py

# The wheel is installed and run where no source is near.
release: $(INSTALLED)  ## Build and check wheel and sdist in dist/, run the demo from the wheel, list its parts: ten minutes.
	@$(BIN)/python -m benchmarks figures --current || { echo "these figures are not current: make figures" >&2; exit 1; }
	@$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[release]'
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz
	$(PYTHON) -m venv build/release
	build/release/bin/pip install $(PIP) -c constraints.txt "$$(echo dist/*.whl)[quantize]"
	cd build/release && ./bin/celosia demo
	$(BIN)/cyclonedx-py requirements requirements.lock --output-file dist/celosia.cdx.json
	@ls -l dist

format: $(INSTALLED)  ## Format the sources.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what was built here; simulators stay in the user's cache folder.
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One installation for all targets, repeated only when its inputs change.
# Python compiles what is imported, when it is: most of what is installed never is.
PIP := --quiet --disable-pip-version-check --no-compile
# LOCK= takes whatever files the index has of the versions in constraints.txt.
LOCK ?= requirements.lock
$(INSTALLED): pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "celosia needs Python 3.11 or newer, not $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	@command -v g++ clang++ $(CXX) >/dev/null \
		|| { echo "celosia needs a C++ compiler; Debian, Ubuntu: apt-get install g++" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "cannot make $(VENV); Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) (once) ..."
	@$(if $(LOCK),$(BIN)/python -m pip install $(PIP) --require-hashes --no-deps -r $(LOCK) \
		|| { echo "not the files that were tested; LOCK= after make installs without their digests" >&2; exit 1; })
	@$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[test,prove]'
	@touch $@

$(VENV)/.torch: $(INSTALLED)
	@echo "Installing PyTorch into $(VENV) (once) ..."
	@$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[test,prove,torch]'
	@touch $@
