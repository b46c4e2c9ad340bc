# make serve    install, fetch the default model once, serve it on http://127.0.0.1:8000
# make test     install, fetch the default model once, then lint, types and the whole suite
# make gateway-demo  two embedded engines and a gateway before them, a mixed load, and what became of it
# make test-vllm  install vLLM's CPU build in an environment of its own, once, and run the tests inside vLLM
# make test-ray   install Ray Serve in an environment of its own, once, and run the tests inside Ray Serve
# make install  only make the environment (VENV=.venv, PYTHON=python3)
# make lint     ruff and mypy
#
# make serve PORT=9000 MODEL=/path/to/model CONFIG=tidegate.toml ARGS="--host 0.0.0.0"
# make test  ARGS="-k planner -x"

SHELL := bash
VENV ?= .venv
PYTHON ?= python3
HOST ?=
PORT ?=
MODEL ?=
CONFIG ?=
ARGS ?=
BIN := $(VENV)/bin

export VENV PYTHON

.PHONY: install serve gateway-demo test test-vllm test-ray lint model clean

install:
	@scripts/install

serve: install
	@exec $(BIN)/tidegate serve $(if $(MODEL),--model "$(MODEL)") $(if $(HOST),--host "$(HOST)") \
	    $(if $(PORT),--port "$(PORT)") $(if $(CONFIG),--config "$(CONFIG)") $(ARGS)

gateway-demo: model
	@$(BIN)/python scripts/gateway_demo.py

model: install
	@$(BIN)/tidegate models --fetch smollm2-135m --verify

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint model
	$(BIN)/python -m pytest $(ARGS)

# The tests that compute nothing run on the older minor as well. Warnings are those of vLLM's imports.
test-vllm: model
	@vllm=$$(scripts/install-vllm) && \
	    $$vllm/bin/python -m pytest tests/vllm $(ARGS) && \
	    PYTHONPATH=$$vllm/older $$vllm/bin/python -m pytest tests/vllm \
	        --ignore=tests/vllm/test_real_engine.py $(ARGS)

test-ray: model
	@ray=$$(scripts/install-ray) && $$ray/bin/python -m pytest tests/ray $(ARGS)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
