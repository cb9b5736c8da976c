# make demo   train, export, serve and load-test the date model
# make serve  serve the date model until Ctrl-C
# make install  the commands that serve, export, import and load-test; make install-dev  the checks too
# make dist   build the source distribution and the wheel into dist/
# make test   every check: format, lint, types, import rules, protocol, tests
# make test-long   the tests that need more time, larger models or more random examples
# make test-emulated   all of what the CUDA provider of onnxruntime makes of our graphs, without a GPU
# make pictures   the pictures of the pages, from what runs; needs Chromium
# make demo GPU=1, make test GPU=1, ...   on a machine with a GPU: an environment of its own

PYTHON ?= python3
ifeq ($(GPU),1)
VENV := .venv-gpu
EXTRAS := gpu,serve,http,export,import,loadtest
SIZE := 3 GB
DEMO := demo --device cuda --out demo-gpu
# Those marked gpu are among them.
MARKED := -m "not long and not emulated and not ray"
COMPUTING := $(MARKED)
WAITING := $(MARKED)
BESIDE := 1
else
VENV := .venv
EXTRAS := cpu,serve,http,export,import,loadtest
SIZE := 2.2 GB
DEMO := demo
COMPUTING := -n 2 --dist worksteal
WAITING := -n 2 --dist loadfile
BESIDE := 2
endif
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
SAID := $(VENV)/tests-that-wait.log

# Both names: older pip applies the first to build environments too, newer pip wants the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # tests start many processes, and each would compile our modules

.PHONY: install install-dev demo serve dist test tests-that-compute tests-that-wait collected test-long emulated-device test-emulated lint format proto proto-released pages pictures clean

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

$(INSTALLED_DEV): EXTRAS := $(EXTRAS),dev

$(INSTALLED) $(INSTALLED_DEV): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	@echo 'installing into $(VENV): $(SIZE), two to five minutes where the network is quick'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	touch $(INSTALLED) $@

demo: install
	$(BIN)/tokenweir $(DEMO)

serve: install
	$(BIN)/tokenweir $(DEMO) --keep-serving

test: install-dev
	$(MAKE) -j 2 lint collected emulated-device
	$(MAKE) -k -j $(BESIDE) tests-that-compute tests-that-wait; status=$$?; cat $(SAID); exit $$status

# Folders of tests that trace models, which keeps two cores busy to the end.
TRACING := tests/emulated tests/exporter tests/parity

tests-that-compute: install-dev
	$(BIN)/pytest $(COMPUTING) $(TRACING)

# All others wait for servers and times, most of all Ray's; what they say comes behind the former.
tests-that-wait: install-dev
	$(BIN)/pytest $(WAITING) $(TRACING:%=--ignore=%) >$(SAID) 2>&1; failed=$$?; \
	$(BIN)/pytest -m "ray and not long" $$(grep -rl --include='*.py' pytest.mark.ray tests) >>$(SAID) 2>&1 && exit $$failed

# Compiles tests and modules while mypy has one of two cores: else each process of tests does.
collected: install-dev
	-$(BIN)/pytest --collect-only -q >/dev/null

# Without it the tests marked emulated are skipped, each with what is missing.
emulated-device: install-dev
ifneq ($(GPU),1)
	-$(MAKE) .emulated/.installed
endif

# onnxruntime's host code for CUDA on an emulated device, which gcc builds.
test-emulated: install-dev .emulated/.installed
	gcc --version
	$(BIN)/pytest -m emulated tests/emulated

# The headers have a folder of their own: the library beside them is none of the emulated device.
.emulated/.installed: constraints.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target .emulated onnxruntime-gpu
	$(BIN)/pip install --quiet --no-deps --upgrade --target .emulated/headers nvidia-cuda-runtime nvidia-cuda-crt
	touch $@

test-long: install-dev
	$(BIN)/pytest -m "long and not gpu and not emulated"
	$(BIN)/pytest -m "hypothesis and not long" --hypothesis-profile "many examples" tests/engine

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against released.binpb

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install-dev
	sh proto/generate.sh
	$(BIN)/python proto/sync_calls.py

pages: install-dev
	$(BIN)/python -m server.cli.reference
	$(BIN)/python -m exporter.families

pictures: install packages/dates
	$(BIN)/python -m loadtest.lab pictures

checkpoints/dates: | install
	$(BIN)/tokenweir train dates --out $@

packages/dates: | checkpoints/dates
	$(BIN)/tokenweir export checkpoints/dates --out $@

# At a release only: keeps its protocol, which later releases extend and never break.
proto-released: install-dev
	cd proto && ../$(BIN)/buf build --exclude-source-info -o released.binpb

# Builds in an environment of its own, with the hatchling of constraints.txt.
dist: install-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	ls -l dist

clean:
	rm -rf .venv .venv-gpu .emulated demo demo-gpu dist
