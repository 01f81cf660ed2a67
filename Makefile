# Everything from nothing but Python 3.11+, pip and make:  make demo,  make test
PYTHON ?= python3
VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all docs lint types audit check clean

demo: $(VENV)/demo.installed          ## train LeNet on 4,000 real digits, on 2 devices, and write a report
	$(VENV)/bin/convoy train --recipe lenet-mnist --data mnist-mini --epochs 20 --devices 2

test: $(VENV)/dev.installed           ## the quick tests of every subject, two at a time: three minutes
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not matrix"

test-all: $(VENV)/dev.installed       ## every test but the largest networks
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations 20

docs: $(VENV)/docs.installed          ## write the guides and the Python reference as pages: build/docs/index.html
	$(VENV)/bin/python -m sphinx -b html -E -W --keep-going -q docs build/docs

lint: $(VENV)/dev.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/dev.installed
	$(VENV)/bin/mypy

audit: $(VENV)/audit.installed        ## known vulnerabilities of what the container installs, as far as the registry tells
	$(VENV)/bin/pip-audit --disable-pip --require-hashes -r requirements.lock

check: test-all lint types docs       ## all that CI runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist
