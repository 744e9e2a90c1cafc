# Each target builds what it needs first: "make demo" and "make test" work in a fresh checkout.
#   STACK=paddle3 (default: Paddle 3.3.1, in .venv/), STACK=paddle2 (Paddle 2.6.2, in .venv-paddle2/) or
#   STACK=gpu     (Paddle 2.6.2 for CUDA 11.8, in .venv-gpu/; without a GPU it runs on the CPU)
#   ARGS="..."    options for the program of the target, for instance: make test ARGS="-k merging"
#   PYTHON=...    interpreter for new environments, instead of the first that fits
#   VENV=...      another folder for the environment; make refuses one that it did not make and that has another Paddle
STACK ?= paddle3
ARGS ?=

lock.paddle3 := requirements.txt
venv.paddle3 := .venv
size.paddle3 := 2
lock.paddle2 := requirements/paddle2.txt
venv.paddle2 := .venv-paddle2
size.paddle2 := 2
lock.gpu := requirements/gpu.txt
venv.gpu := .venv-gpu
size.gpu := 5
LOCK := $(lock.$(STACK))
VENV := $(venv.$(STACK))
ifeq ($(VENV),)
$(error STACK=$(STACK) is not a stack: it is paddle3 (the default), paddle2 or gpu)
endif

# The first interpreter that starts (a pyenv shim may fail), is 3.10 to 3.12 and has venv and ensurepip.
RUNS := -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
PYTHON ?= $(shell for p in python3.12 python3.11 python3.10 python3; do $$p $(RUNS) && echo $$p && break; done)
NO_PYTHON := Needs Python 3.10, 3.11 or 3.12 with venv (Debian, Ubuntu: apt-get install python3-venv), or name one with PYTHON=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# All packages are locked: pip must not resolve others (--no-deps), and must build with the locked setuptools.
INSTALL := $(PIP) install --quiet --no-deps --no-build-isolation
# Paddle needs the system's libgomp.so.1. If it is missing, as in slim containers, the targets use the copy in scikit-learn's wheel.
LIBGOMP := $(CURDIR)/$(VENV)/lib/libgomp
LINK_LIBGOMP := mkdir -p $(LIBGOMP) && ln -sf ../$$(cd $(VENV)/lib && ls python3*/site-packages/scikit_learn.libs/libgomp-*.so.*) $(LIBGOMP)/libgomp.so.1
export LD_LIBRARY_PATH := $(LIBGOMP)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-install test-newer test-ray test-optimum browser test-page check docs format bench alternatives figures load fuzz lock dist clean

help: ## list the targets
	@echo 'make TARGET [STACK=paddle3|paddle2|gpu] [ARGS="..."] [PYTHON=python3.x]'
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST)

# Stamp files: an environment is up to date until its lock file or the package's metadata change.
$(VENV)/.installed: requirements/build.txt requirements/common.txt $(LOCK) setup.py ppdiffusers_tome/_version.py
	@.ci/check_environment.sh $(VENV) $(LOCK) $(STACK)
	@$(PY) -m pip --version >/dev/null 2>&1 || { $(PYTHON) $(RUNS) || { echo '$(NO_PYTHON)' >&2; exit 1; }; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "creating $(VENV)/ with $(PYTHON): $(size.$(STACK)) GB, a few minutes"; $(PYTHON) -m venv --clear $(VENV) && touch $(VENV)/.made-by-make; }
	$(INSTALL) -r requirements/build.txt
	$(INSTALL) -r $(LOCK)
	$(INSTALL) -e .
	@$(PY) -c "import ctypes; ctypes.CDLL('libgomp.so.1')" 2>/dev/null || { $(LINK_LIBGOMP); echo 'no libgomp.so.1 in the system (Debian, Ubuntu: apt-get install libgomp1): outside make, set LD_LIBRARY_PATH=$(LIBGOMP)'; }
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements/test.txt
	$(INSTALL) -r requirements/test.txt
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-test ppdiffusers_tome/requirements/ray.txt
	$(INSTALL) -r ppdiffusers_tome/requirements/ray.txt
	@touch $@

venv: $(VENV)/.installed ## create the virtual environment with the locked stack and this package

demo: $(VENV)/.installed ## compare plain and merged images of the bundled model, into outputs/: minutes
	$(PY) -m ppdiffusers_tome compare --model examples/scenes_sd --steps 8 $(ARGS)

# OpenAI's client for JavaScript. Its test is skipped without it, so that a machine without npm or a registry can test the rest.
JAVASCRIPT := build/javascript/.installed
$(JAVASCRIPT): tests/serving/javascript/package.json tests/serving/javascript/package-lock.json
	@mkdir -p $(@D) && cp $^ $(@D)
	@if ! command -v npm >/dev/null; then echo 'no npm (Debian: apt-get install npm): the test of the client for JavaScript is skipped'; \
	elif cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund --fetch-retries=0 --silent; then touch $(@F); \
	else echo 'npm cannot install the client for JavaScript, its test is skipped: "npm ci" in $(@D) shows why'; fi

test: $(VENV)/.installed-test $(JAVASCRIPT) ## run the test suite in two processes of one thread each
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(ARGS)

test-install: ## install ".[cpu]" with pip into an empty environment of 2 GB, and run the commands in it: five minutes
	@test -n "$(PYTHON)" || { echo '$(NO_PYTHON)' >&2; exit 1; }
	PYTHON=$(PYTHON) .ci/test_install.sh

# SOURCE is the folder that contains the package ppdiffusers, as PaddleMIX/ppdiffusers does.
NEWER := made_up_family patch attention transformers features api models macs rotary newer_pipelines
test-newer: $(VENV)/.installed-test ## test merging on another ppdiffusers: SOURCE=its folder; those after 0.29.0 need Paddle 3
	@test -f "$(SOURCE)/ppdiffusers/__init__.py" || { echo 'Needs SOURCE=DIR, the folder that contains the package ppdiffusers' >&2; exit 1; }
	PPDIFFUSERS_SOURCE="$(abspath $(SOURCE))" OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(NEWER:%=tests/core/test_%.py) tests/pipelines $(ARGS)

test-all: ## run the tests of a release: both stacks, and a newer ppdiffusers in SOURCE; an hour, and one table at the end
	SOURCE="$(SOURCE)" .ci/test_all.sh

test-ray: $(VENV)/.installed-ray ## run the tests that start Ray: a few minutes
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -m ray -n 0 tests/serving/test_ray.py $(ARGS)

test-optimum: $(VENV)/.installed-test build/optimum-venv/.complete ## load exports with --layout diffusers in Optimum and OpenVINO GenAI, and merge UNets that PyTorch exports, in build/optimum-venv/ (2 GB): fifteen minutes
	OPTIMUM_PYTHON=$(abspath build/optimum-venv/bin/python) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 0 tests/export/test_diffusers_layout_loaders.py tests/export/test_merge_onnx_pytorch.py $(ARGS)

build/optimum-venv/.complete: requirements/optimum.txt
	$(PYTHON) -m venv --clear build/optimum-venv
	build/optimum-venv/bin/pip --disable-pip-version-check install --quiet --no-deps -r requirements/optimum.txt
	@touch $@

# The browser is the system's: CHROMIUM=... names another than chromium or google-chrome.
CHROMIUM ?= $(shell command -v chromium || command -v google-chrome)
browser:
	@test -n "$(CHROMIUM)" || { echo 'Needs a browser (Debian: apt-get install chromium), or name one with CHROMIUM=' >&2; exit 1; }

test-page: browser $(VENV)/.installed-test build/page-model/scenes_sd/tome.json ## test the page in a browser, write images of it to build/page/ and docs/page.png: five minutes
	mkdir -p build/page
	CHROMIUM=$(CHROMIUM) PAGE_MODEL=build/page-model/scenes_sd PAGE_SCREENSHOTS=build/page OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n 0 tests/serving/test_page.py tests/serving/test_page_scripts.py $(ARGS)
	if [ -f build/page/page.png ]; then cp build/page/page.png docs/page.png; fi

build/page-model/scenes_sd/tome.json: $(VENV)/.installed
	$(PY) -m ppdiffusers_tome export --model examples/scenes_sd --output build/page-model/scenes_sd --ratio 0.75 0.5 0.875 0 --img2img --overwrite

check: $(VENV)/.installed-test ## run ruff, ruff format and mypy without changes
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The site has an environment of its own; nothing of it needs Paddle or this package installed. REPOSITORY=https://… is where links to scripts and results lead.
docs: build/docs-venv/.complete ## build the site of the documents in build/site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict $(ARGS)

build/docs-venv/.complete: requirements/docs.txt
	$(PYTHON) -m venv --clear build/docs-venv
	build/docs-venv/bin/pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	@touch $@

format: $(VENV)/.installed-test ## fix and format with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The committed results of passes: hours on two cores. Run it again to resume it after it was killed.
#   RESULTS=...      folder for the results; the reports go to its parent
RESULTS ?= benchmarks/results
SCENES = --model examples/scenes_sd --size 256
BENCH = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) benchmarks/bench.py
METHODS = --merging method=interlace,ratio=0.5 method=interlace,ratio=0.75 method=interlace,ratio=0.9375 method=todo,ratio=0.75 method=tomesd,ratio=0.5
SD15 = $(BENCH) --architecture sd15 --batch 2 --threads 2
SD15_METHODS = --arms plain tome --merging ratio=0.75 ratio=0.5 method=todo,ratio=0.75

bench: $(VENV)/.installed ## measure time and memory of passes, and write their report: hours
	$(BENCH) $(SCENES) --backend eager predictor --arms plain memory-efficient tome both built-in $(METHODS) --threads 1 --output $(RESULTS)/scenes_unet.json
	$(BENCH) $(SCENES) --backend predictor --arms plain tome --merging ratio=0.75 ratio=0.75,merge_steps=all --threads 1 --output $(RESULTS)/scenes_predictor_unet.json
	$(BENCH) $(SCENES) --backend onnxruntime openvino openvino-bf16 --arms plain tome $(METHODS) --threads 1 --output $(RESULTS)/scenes_exported_unet.json
	$(BENCH) --model examples/scenes_sd --size 128 192 256 --batch 2 4 --arms plain tome --ratio 0.5 0.75 0.9375 --threads 1 --output $(RESULTS)/scenes_sizes.json
	$(SD15) --size 512 --arms plain memory-efficient tome both --rounds 3 --output $(RESULTS)/sd15_eager.json
	$(SD15) --size 512 $(SD15_METHODS) method=tomesd,ratio=0.5 --backend onnxruntime --output $(RESULTS)/sd15_512_onnxruntime.json
	$(SD15) --size 512 --arms plain tome --merging ratio=0.75 method=todo,ratio=0.75 --backend openvino --rounds 5 --output $(RESULTS)/sd15_512_openvino.json
	$(SD15) --size 512 --arms plain tome --merging method=todo,ratio=0.75 --backend openvino --rounds 5 --output $(RESULTS)/sd15_512_openvino_todo.json
	$(SD15) --size 512 --arms plain tome --rounds 9 --merging ratio=0.5 --backend openvino --output $(RESULTS)/sd15_512_openvino_half.json
	$(SD15) --size 512 --arms plain tome --rounds 9 --merging method=tomesd,ratio=0.5 --backend openvino --output $(RESULTS)/sd15_512_openvino_tomesd.json
	$(SD15) --size 512 $(SD15_METHODS) --backend openvino-bf16 --rounds 7 --output $(RESULTS)/sd15_512_openvino-bf16.json
	$(SD15) --size 512 --arms plain tome --rounds 9 --merging method=todo,ratio=0.75 --backend openvino-bf16 --output $(RESULTS)/sd15_512_openvino-bf16_todo.json
	$(SD15) --size 768 --arms plain tome --ratio 0.75 --backend onnxruntime --rounds 5 --output $(RESULTS)/sd15_768_onnxruntime.json
	$(SD15) --size 768 --arms plain tome --ratio 0.75 --backend openvino --rounds 5 --output $(RESULTS)/sd15_768_openvino.json
	$(SD15) --size 768 --arms plain tome --rounds 5 --merging ratio=0.5 method=todo,ratio=0.75 method=tomesd,ratio=0.5 --backend onnxruntime --output $(RESULTS)/sd15_768_onnxruntime_methods.json
	$(SD15) --size 768 --arms plain tome --rounds 5 --merging ratio=0.5 --backend openvino --output $(RESULTS)/sd15_768_openvino_half.json
	$(SD15) --size 768 --arms plain tome --rounds 5 --merging method=todo,ratio=0.75 --backend openvino --output $(RESULTS)/sd15_768_openvino_todo.json
	$(SD15) --size 768 --arms plain tome --rounds 7 --merging method=tomesd,ratio=0.5 --backend openvino --output $(RESULTS)/sd15_768_openvino_tomesd.json
	OMP_NUM_THREADS=1 $(PY) benchmarks/sdxl_blocks.py --output $(RESULTS)/sdxl_blocks.json
	$(BENCH) report $(RESULTS)/*.json --output $(RESULTS)/..

# A result of these images and sources is continued, and any other is replaced. RESULTS=build/alternatives/results keeps it.
ALTERNATIVES = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) benchmarks/alternatives.py

MORE_ARMS = --only "interlace 0.5, merge_steps='all'" "interlace 0.75, merge_steps='all'" "interlace 0.875, merge_steps='all'" "tomesd 0.5" "tomesd 0.25"
VARIANT_ARMS = --only "interlace 0.5, merge_steps='all'" "interlace 0.75, merge_steps='all'" "todo 0.75" "tomesd 0.5"

alternatives: $(VENV)/.installed-test ## compare merging with fewer steps, cached features and both by whole images, and write their page: hours
	for mode in --restart --time; do \
	$(ALTERNATIVES) --model examples/emoji_sd --size 128 --count 32 --output $(RESULTS) $$mode && \
	$(ALTERNATIVES) $(SCENES) --count 24 --output $(RESULTS) $$mode && \
	$(ALTERNATIVES) $(SCENES) --count 24 --strength 0.4 --output $(RESULTS) $$mode && \
	$(ALTERNATIVES) $(SCENES) --count 12 --dpm-solver $(VARIANT_ARMS) --output $(RESULTS) $$mode && \
	$(ALTERNATIVES) $(SCENES) --count 12 --steps 10 $(VARIANT_ARMS) --output $(RESULTS) $$mode && \
	$(ALTERNATIVES) $(SCENES) --count 12 --guidance-scale 7.5 $(VARIANT_ARMS) --output $(RESULTS) $$mode || exit 1; done
	$(ALTERNATIVES) $(SCENES) --count 64 --more $(MORE_ARMS) --output $(RESULTS) --restart
	$(ALTERNATIVES) report --output $(RESULTS)

figures: $(VENV)/.installed ## write the figures of the committed results into the documents
	$(PY) benchmarks/document_figures.py $(ARGS)

load: $(VENV)/.installed-test build/load/tome.json ## load test of a real server: five minutes
	$(PY) benchmarks/tools/load.py --model build/load $(ARGS)

# schemathesis is not locked: it has its own environment and tests the server over HTTP.
fuzz: $(VENV)/.installed-test build/load/tome.json build/fuzz-venv/.complete ## test the server against /openapi.json, and damaged exports (ARGS="--seed 7"): a few minutes
	build/fuzz-venv/bin/python benchmarks/tools/fuzz_http.py --model build/load --server-python $(PY) $(ARGS)
	$(PY) benchmarks/tools/fuzz_files.py --model build/load $(ARGS)

build/fuzz-venv/.complete:
	$(PYTHON) -m venv build/fuzz-venv
	build/fuzz-venv/bin/pip install --quiet schemathesis==4.32.5
	@touch $@

build/load/tome.json: $(VENV)/.installed
	$(PY) -m ppdiffusers_tome export --model examples/emoji_sd --output build/load --overwrite --ratio 0.5 0 --img2img --size 64 128

lock: ## resolve the stacks again and rewrite the requirements files
	PYTHON="$(PYTHON)" requirements/lock.sh

# REPOSITORY=https://… is where links of the long description lead; without it they are plain text.
# The wheel is built from the sdist, and tried beside the locked set in an environment without the test tools: build/release-venv/.
# diff prints what git tracks and the sdist lacks.
RELEASE_VENV := build/release-venv
dist: build/dist-venv/.complete ## build sdist and wheel in dist/, check them, and generate an image with the wheel in an environment of 2 GB
	rm -rf dist build/lib *.egg-info
	build/dist-venv/bin/python -m build --no-isolation .
	build/dist-venv/bin/twine check --strict dist/*
	build/dist-venv/bin/check-wheel-contents dist/*.whl
	build/dist-venv/bin/cffconvert --validate
	tar tzf dist/*.tar.gz | sed 's|^[^/]*/||' | LC_ALL=C sort > build/sdist.txt
	git ls-files | LC_ALL=C sort | LC_ALL=C comm -23 - build/sdist.txt | diff /dev/null -
	$(MAKE) VENV=$(RELEASE_VENV) $(RELEASE_VENV)/.installed
	$(RELEASE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall dist/*.whl
	mkdir -p build/release && cd build/release && env -u PYTHONPATH LD_LIBRARY_PATH=$(CURDIR)/$(RELEASE_VENV)/lib/libgomp ../release-venv/bin/python -I $(CURDIR)/.ci/generate_image.py $(CURDIR)/examples/emoji_sd fox.png

build/dist-venv/.complete: requirements/dist.txt
	$(PYTHON) -m venv --clear build/dist-venv
	build/dist-venv/bin/pip --disable-pip-version-check install --quiet --no-deps -r requirements/dist.txt
	@touch $@

clean: ## remove environments, caches and build products (not outputs/)
	rm -rf $(venv.paddle3) $(venv.paddle2) $(venv.gpu) .venv-paddle3 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
