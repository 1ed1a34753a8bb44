# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make .venv themselves with plain venv and pip, from the pins in constraints.txt.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

# What matters on a CPU: OpenMP threads that wait spin only briefly, no page faults for every big
# activation, and never a look at a model hub.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 5000
export MALLOC_MMAP_MAX_ ?= 0
export MALLOC_TRIM_THRESHOLD_ ?= 8000000000
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-all test-vllm venv-lmms test-lmms venv-verl test-verl test-trackers venv-docs docs lint bench study clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "FastRL needs Python 3.11, 3.12 or 3.13; $(PYTHON) is `$(PYTHON) -V`. Choose one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[trl,report,dev]"
	@touch $(READY)

demo: $(READY)          ## train stock GRPO and GRPO + FastRL side by side; print a table, draw a figure
	$(BIN)/fastrl train recipes/testbed/quickstart.yaml

test: $(READY) lint     ## style, types, layers and every test that is not slow
	$(BIN)/pytest -m "not slow"

test-all: $(READY) lint ## the same and the slow tests
	$(BIN)/pytest

.venv-vllm/.ready: pyproject.toml tests/with_vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -r tests/with_vllm/requirements.txt
	.venv-vllm/bin/pip uninstall --quiet --yes torchcodec torchaudio  # CUDA builds: their import stops vLLM
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@# vLLM inspects models in processes of its own: the bridge must be there when they start.
	printf '%s\nimport bridge\n' "$(CURDIR)/tests/with_vllm" > "`.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/bridge.pth"
	@touch .venv-vllm/.ready

test-vllm: .venv-vllm/.ready ## generation through real vLLM on the CPU (3.6 GB, an environment of its own)
	.venv-vllm/bin/python -m pytest tests/with_vllm

.venv-lmms/.ready: tests/with_lmms/requirements.txt
	$(PYTHON) -m venv .venv-lmms
	.venv-lmms/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-lmms/bin/pip install --quiet --disable-pip-version-check -r tests/with_lmms/requirements.txt
	.venv-lmms/bin/pip install --quiet --disable-pip-version-check --no-deps lmms-eval==0.7.3
	@touch .venv-lmms/.ready

venv-lmms: .venv-lmms/.ready ## lmms-eval for `fastrl eval`, in an environment of its own (1.5 GB)

test-lmms: $(READY) .venv-lmms/.ready ## the four out-of-domain sets through real lmms-eval, on ten items each
	$(BIN)/pytest tests/with_lmms

.venv-verl/.ready: pyproject.toml tests/with_verl/requirements.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-verl/bin/pip install --quiet --disable-pip-version-check -r tests/with_verl/requirements.txt
	.venv-verl/bin/pip uninstall --quiet --yes torchcodec torchaudio  # CUDA builds: their import stops vLLM
	.venv-verl/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@# verl and vLLM start processes of their own: the bridge must be there when they do.
	printf '%s\nimport bridge\n' "$(CURDIR)/tests/with_vllm" > "`.venv-verl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/bridge.pth"
	@touch .venv-verl/.ready

venv-verl: .venv-verl/.ready ## real verl with real vLLM on the CPU, in an environment of its own (4 GB)

test-verl: .venv-verl/.ready ## the verl adapter in whole runs of real verl on CPU processes (under 30 minutes)
	.venv-verl/bin/python -m pytest tests/with_verl

.venv-trackers/.ready: pyproject.toml tests/with_trackers/requirements.txt
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check -r tests/with_trackers/requirements.txt
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch .venv-trackers/.ready

test-trackers: .venv-trackers/.ready ## our metrics in the files of TensorBoard, W&B, trackio and MLflow (1.8 GB)
	.venv-trackers/bin/python -m pytest tests/with_trackers

.venv-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch .venv-docs/.ready

venv-docs: .venv-docs/.ready

docs: .venv-docs/.ready ## the documentation as a site in site/: every link and page is checked, and no network is needed
	PYTHONPATH=src .venv-docs/bin/python -m fastrl.report.reference docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "site/index.html; to search in it as well: .venv-docs/bin/mkdocs serve"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(READY)         ## the figures of docs/benchmarks.md (three hours on two cores)
	$(BIN)/python benchmarks/selection_cost.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/time_to_accuracy.py
	$(BIN)/python benchmarks/two_processes.py
	$(BIN)/python benchmarks/deferral.py
	$(BIN)/python benchmarks/peak_memory.py
	$(BIN)/python benchmarks/methods.py headline
	$(BIN)/python benchmarks/methods.py grid
	$(BIN)/python benchmarks/methods.py peers

# The study of docs/results/study.md. Cells that are there are not trained again: stop it and start it as you like.
STUDY_METHODS := grpo shared fastrl unbiased without_mdap without_ars cppo pods greso random25 random50 random75 \
	advantage_only 2grpo fixed_g4 fixed_g
STUDY_TAU     := grpo fastrl:tau=0 fastrl:tau=0.2 fastrl:tau=0.4 fastrl:tau=0.6 fastrl fastrl:tau=1
STUDY_OPTIONS ?= --seeds 5 --jobs 2 --clock processor

study: $(READY)         ## every method x loss x seed on both problem sets, and one page of it (hours on two cores)
	$(BIN)/fastrl compare recipes/testbed/study.yaml --methods $(STUDY_METHODS) --losses grpo dapo gspo $(STUDY_OPTIONS) --out runs/study/short
	$(BIN)/fastrl compare recipes/testbed/study_long.yaml --methods $(STUDY_METHODS) --losses grpo dapo gspo $(STUDY_OPTIONS) --out runs/study/long
	@# tau 0.8 and the baseline are there already: the same runs, the same seconds.
	for set in short long; do mkdir -p runs/study/$$set-tau/cells/grpo; \
		cp runs/study/$$set/cells/grpo/grpo-seed*.json runs/study/$$set/cells/grpo/fastrl-seed*.json runs/study/$$set-tau/cells/grpo; done
	$(BIN)/fastrl compare recipes/testbed/study.yaml --methods $(STUDY_TAU) $(STUDY_OPTIONS) --out runs/study/short-tau
	$(BIN)/fastrl compare recipes/testbed/study_long.yaml --methods $(STUDY_TAU) $(STUDY_OPTIONS) --out runs/study/long-tau
	$(BIN)/fastrl diagnose --out runs/study/diagnose-short
	$(BIN)/fastrl diagnose --problems long --out runs/study/diagnose-long
	$(BIN)/fastrl report runs/study/short runs/study/long runs/study/short-tau runs/study/long-tau -o runs/study/report.html

clean:
	rm -rf .venv .venv-vllm .venv-lmms .venv-verl .venv-trackers .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
