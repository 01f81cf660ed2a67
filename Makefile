# Everything from nothing but Python 3.11+, pip and make:  make demo,  make test
PYTHON ?= python3
VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test docs lint types check clean

demo: $(VENV)/demo.installed          ## train LeNet on 4,000 real digits, on 2 devices, and write a report
	$(VENV)/bin/convoy train --recipe lenet-mnist --data mnist-mini --epochs 20 --devices 2

test: $(VENV)/dev.installed           ## run the tests, two at a time
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations 20

docs: $(VENV)/docs.installed           ## write build/docs/index.html: the guides, and the reference of the Python interface
	$(VENV)/bin/python -m sphinx -b html -E -W --keep-going -q docs build/docs

lint: $(VENV)/dev.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/dev.installed
	$(VENV)/bin/mypy

check: test lint types docs                ## all that CI runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist
