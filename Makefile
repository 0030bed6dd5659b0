# Two commands do everything on a fresh Linux machine with Python 3.10-3.14: `make demo` and `make test`.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-rest test-changed test-record test-oldest test-newest test-wheel check format docs reference screenshots bench clean

# The set-up leaves compiling to the first import, and some containers forbid Python to store what it has compiled:
# every start would compile torch and transformers anew, twice the time.
unexport PYTHONDONTWRITEBYTECODE
# Another package of our name would be tested.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE

BIN := .venv/bin
PYTEST_ARGS ?=
DEMO_ARGS ?=
JOBS ?= $(shell nproc)
SHARD ?=
MINUTES ?=
BASE ?= main
RUN_TESTS = env -u MAKEFLAGS -u MFLAGS $(BIN)/python scripts/run_tests.py --jobs "$(JOBS)" $(if $(SHARD),--shard "$(SHARD)") $(if $(MINUTES),--minutes "$(MINUTES)")

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | while IFS=$$'\t' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: ## make .venv with CPU torch, this package and its tools (every target does this by itself)
	@scripts/setup.sh

demo: setup ## tokenizer, pretraining, mid-training, fine-tuning, evaluation, a conversation, a report: 5 minutes on 2 cores
	@$(BIN)/anabatic run demo $(DEMO_ARGS)

check: setup ## lint, format, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup ## before every commit, 10 minutes: checks, house, unit and smoke tests; PYTEST_ARGS="tests/unit -k loader -x" runs those alone
	@$(RUN_TESTS) $(if $(PYTEST_ARGS),pick -- $(PYTEST_ARGS),test)

ifneq ($(filter test-all test-rest test-changed,$(MAKECMDGOALS)),)
ifneq ($(PYTEST_ARGS),)
$(error PYTEST_ARGS is for `make test`: make test PYTEST_ARGS="$(PYTEST_ARGS)")
endif
endif

test-all: setup ## everything, 35 minutes: `make test`, then commands, pages, browsers, clusters, simulated NPUs; SHARD=2/4 runs a part
	@$(RUN_TESTS) all

test-rest: setup ## what `make test-all` runs after `make test`; MINUTES=30 starts no test later and names what was not run
	@$(RUN_TESTS) rest

test-changed: setup ## the tests that the files that differ from main can affect; BASE=HEAD: from the last commit
	@$(RUN_TESTS) changed --base "$(BASE)"

test-record: setup ## keep the seconds of the last `make test-all` in tests/seconds.json
	@$(RUN_TESTS) record

# Warnings of libraries that are newer or older than the pinned ones are no mistake of ours.
OTHER := env -u MAKEFLAGS -u MFLAGS
OTHER_ARGS = -n $(JOBS) --dist loadfile -W default $(or $(PYTEST_ARGS),tests/smoke tests/e2e)

test-oldest: ## end-to-end tests with the lower bounds of pyproject.toml, in .venv-oldest (Python 3.10; PYTHON=... names it)
	@scripts/setup_other.sh oldest
	@$(OTHER) .venv-oldest/bin/python -m pytest $(OTHER_ARGS)

test-newest: ## the same with the newest torch that has a torch_npu, in .venv-newest
	@scripts/setup_other.sh newest
	@$(OTHER) .venv-newest/bin/python -m pytest $(OTHER_ARGS)

test-wheel: setup ## every command with the wheel and its base dependencies alone (.venv-wheel), the pages with its extra serve (.venv-serve)
	@scripts/setup_other.sh wheel
	@$(OTHER) ANABATIC_TEST_BARE=$(CURDIR)/.venv-wheel/bin/python $(BIN)/python -m pytest tests/e2e/test_base_dependencies.py
	@scripts/setup_other.sh serve
	@$(OTHER) ANABATIC_TEST_WHEEL=$(CURDIR)/.venv-serve/bin/python $(BIN)/python -m pytest tests/e2e/test_wheel_trial.py

format: setup ## fix format and lint where ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

reference: setup ## write docs/*/reference/*.md, the tables of recipes and the pictures anew from the code
	$(BIN)/python scripts/gen_reference.py
	$(BIN)/python scripts/gen_recipes.py
	$(BIN)/python scripts/gen_schemas.py
	$(BIN)/python scripts/gen_errors.py
	$(BIN)/python scripts/gen_diagrams.py

screenshots: setup ## take the pictures of the web pages in the docs anew, with a training of each (minutes; needs chromium)
	$(BIN)/python scripts/make_screenshots.py

docs: setup ## build the documentation in both languages into docs/site/ (Python 3.11 or newer)
	$(BIN)/zensical build --clean -f docs/zensical.en.toml
	$(BIN)/zensical build --clean -f docs/zensical.zh.toml
	@cp docs/index.html docs/site/index.html
	@echo "look at it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/site 8000, then http://127.0.0.1:8000/"

# Parts of others, and those that need another program or data (benchmarks/README.md).
NOT_ALONE := paired roofline_limit roofline_profile libraries fault_kinds fault_machines fault_ray fault_slurm serve_latency evals evals_agree pretrain_bits pretrain_nanochat rl vessels vessels_speed plan_tables near_duplicates web_pages npu_jobs sim_ranks option_types serve_llama
BENCHMARKS := $(filter-out $(NOT_ALONE:%=benchmarks/%.py), $(sort $(wildcard benchmarks/[a-z]*.py)))

bench: setup ## run every benchmark that needs nothing else (minutes each; on a quiet machine)
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python "$$file" || exit; done

clean: ## remove what building and testing left; keeps .venv and runs
	rm -rf build dist docs/site docs/.cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
