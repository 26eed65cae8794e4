# make demo    from nothing to a streamed answer of a mesh on this machine
# make test    from nothing to all tests passed
# Both keep one environment in .venv; workers and models are cached outside of the checkout (MESHNODE_CACHE).

PYTHON ?= python3
PY := .venv/bin/python
# Named by what it was made from, so that a switch of branches does not install again what is there
STAMP := .venv/.made-from-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
DEMO_LAB := build/demo
DEMO_LAYERS := 0-10,10-20,20-30
DEMO_PROMPT ?= Why is the sky blue? Answer in two sentences.
SEED ?= 1
SECONDS ?= 60
PROMPTS ?= 20
ROUNDS ?= 20
OPS ?= 10000
KILLS ?= 100
FREEZES ?= 20
MODEL ?= smollm2
NODES ?= 8
RECEIPTS ?= 500

.PHONY: help setup worker wheel model demo lint test soak soak-files soak-worker soak-members soak-receipts soak-kills sim-receipts fuzz exact exact-engine arch-sweep bench-engine bench-mesh bench-identity parity-upstream clean bench-receipts bench-routes
.DEFAULT_GOAL := help

help:
	@echo "make demo             a mesh of three nodes on this machine answers a question"
	@echo "make test             every check and test"
	@echo "make setup            the environment in .venv"
	@echo "make worker           the engine's worker, built once a machine: make worker CMAKE_ARGS=-DGGML_CUDA=ON"
	@echo "make wheel            dist/*.whl with workers for every x86-64 level, which installs without a compiler"
	@echo "make model            SmolLM2-135M-Instruct, for the demo and the live tests"
	@echo "make lint             style, types, floors, generated documents"
	@echo "make soak             the live tests with many repetitions: make soak SEED=5 ROUNDS=50"
	@echo "make soak-files       damaged files in a worker with AddressSanitizer: make soak-files SEED=5 ROUNDS=50"
	@echo "make soak-worker      random requests to one worker, each answer held against a fresh one's: OPS=10000 SEED=5"
	@echo "make soak-receipts    receipts in bursts while nodes are killed and come back: NODES=8 RECEIPTS=500"
	@echo "make sim-receipts     fifty nodes, liars among them, on a virtual clock; ends with one line of JSON"
	@echo "make soak-kills       workers and nodes killed and frozen while they answer: KILLS=100 FREEZES=20 SEED=5"
	@echo "make soak-members     twelve processes, one killed and one started every 10 s; fifty meshes started at once: SECONDS=300"
	@echo "make exact            greedy tokens of 20 prompts, three splits of the model against the whole: SEED=5 PROMPTS=20"
	@echo "make arch-sweep       which architectures are exact at every cut; writes their list: make arch-sweep ARGS=--check"
	@echo "make fuzz             wrong frames for the worker built with sanitizers: make fuzz SECONDS=600 SEED=2"
	@echo "make exact-engine     bits of the engine alone, batched, chunked and cut: MODEL=gemma3 for another model"
	@echo "make bench-engine     the engine beside llama.cpp's own programs and beside itself; ends with one line of JSON"
	@echo "make bench-mesh       decode speed of two and three nodes over one; ends with one line of JSON"
	@echo "make bench-routes     the simulated mesh: routes over the optimum, churn, hostile messages, cancels; ends with JSON"
	@echo "make bench-identity   how fast files are hashed and found again; ends with one line of JSON"
	@echo "make bench-receipts   what receipts cost, and how fast they are verified; ends with one line of JSON"
	@echo "make parity-upstream  our worker against the unpatched engine"
	@echo "make clean            forget .venv and build/"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "meshnode needs Python 3.11 or later; name one: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(PY) || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing the environment"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@rm -f .venv/.made-from-* && touch $@

# CMAKE_ARGS="-DGGML_CUDA=ON": options of the engine's build, as MESHNODE_CMAKE_ARGS gives them to every command
export MESHNODE_CMAKE_ARGS ?= $(CMAKE_ARGS)

worker: $(STAMP)
	@$(PY) -m meshnode.worker.build

wheel: $(STAMP)
	@$(PY) -m meshnode.worker.wheel

model: $(STAMP)
	@$(PY) fixtures/fetch_model.py smollm2

demo: worker
	@model=$$($(PY) fixtures/fetch_model.py smollm2) && echo && \
	printf '%s\n\n' "A mesh of three nodes with ten layers each, and one without weights that asks: $(DEMO_PROMPT)" && \
	$(PY) -m meshnode lab run --home $(DEMO_LAB) --nodes 3 --layers $(DEMO_LAYERS) --model "$$model" \
		--chat --prompt "$(DEMO_PROMPT)" --max-tokens 128 --details

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@mkdir -p build && .venv/bin/lint-imports --no-cache >build/floors 2>&1 || { cat build/floors; exit 1; }
	@$(PY) -m meshnode.artifact.architectures --check || \
		{ echo "docs/architectures.md is not current: python -m meshnode.artifact.architectures" >&2; exit 1; }
	@$(PY) -m meshnode.errors --check || { echo "docs/errors.md is not current: python -m meshnode.errors" >&2; exit 1; }

# two at a time: a file's tests stay together, for they share labs
test: worker model lint
	@$(PY) -m pytest -n 2 --dist loadfile

soak: worker model
	@MESHNODE_ROUNDS=$(ROUNDS) MESHNODE_SEED=$(SEED) $(PY) -m pytest --timeout 3600 tests/live

# what is accepted after random changes, loaded by a worker that is built with AddressSanitizer
soak-files: $(STAMP)
	@MESHNODE_WORKER=$$($(PY) -m meshnode.worker.build --target asan --print-path)/meshnode-worker \
		MESHNODE_ROUNDS=$(ROUNDS) MESHNODE_SEED=$(SEED) $(PY) -m pytest --timeout 3600 tests/live/test_accepted.py

soak-worker: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.live.soak_worker --ops $(OPS) --seed $(SEED)

soak-receipts: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.live.soak_receipts --nodes $(NODES) --receipts $(RECEIPTS)

bench-receipts: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.bench.receipts $(ARGS)

sim-receipts: $(STAMP)
	@PYTHONPATH=fixtures $(PY) -m tests.ledger.simulation $(ARGS)

soak-kills: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.live.soak_kills --kills $(KILLS) --freezes $(FREEZES) --seed $(SEED)

soak-members: $(STAMP)
	@$(PY) -m tests.net.churn --seconds $(if $(filter file,$(origin SECONDS)),300,$(SECONDS)) --seed $(SEED)

# Programs among the tests, which import what lies in fixtures/
exact: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.live.exactness --seed $(SEED) --prompts $(PROMPTS)

arch-sweep: $(STAMP)
	@$(PY) -m tests.live.arch_sweep $(ARGS)

exact-engine: $(STAMP)
	@model=$$($(PY) fixtures/fetch_model.py $(MODEL)) && folder=$$($(PY) -m meshnode.worker.build --target tests --print-path) && \
	"$$folder/test_exact" "$$model" 2>/dev/null && "$$folder/test_company" "$$model" 2>/dev/null

bench-engine: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.bench.engine $(ARGS)

bench-mesh: worker model
	@PYTHONPATH=fixtures $(PY) -m tests.bench.mesh

bench-routes: $(STAMP)
	@$(PY) -m meshnode lab simulate --figures --seed $(SEED)

bench-identity: $(STAMP)
	@$(PY) -m tests.artifact.bench

# the same worker, fed with wrong frames
fuzz: $(STAMP)
	@folder=$$($(PY) -m meshnode.worker.build --target asan --print-path) && \
	PYTHONPATH=fixtures $(PY) -m tests.worker.fuzz --worker "$$folder/meshnode-worker" --seconds $(SECONDS) --seed $(SEED)

parity-upstream: model
	@PYTHONPATH=fixtures $(PY) -m tests.live.parity_upstream --seed $(SEED) --prompts $(PROMPTS)

clean:
	rm -rf .venv build
