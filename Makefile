# make demo   draw the same prompts with stock and with the exact plan, and write out/demo/report.html
# make test   run the tests
# make check  everything CI runs: format, lint, types, tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -c keeps the exact versions everywhere: without it torchmetrics would replace the CPU build of torch by a 5 GB one.
# pip compiles 12,600 files in one process, for 60 of its 105 CPU seconds; compileall does it on every core.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt

.PHONY: demo test check install clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fusedit needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP) torch
	@$(PIP) --editable '.[dev,fidelity,gpu]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # pip passes over what does not compile, too
	@touch $@

demo: install
	@$(BIN)/python -m fusedit.demo --out out/demo

# On a GPU one test at a time, so that models of the real size do not share its memory; on CPUs a process a core.
test: install
	@$(BIN)/python -m pytest tests/gpu
	@$(BIN)/python -m pytest tests/cpu -n auto --dist worksteal

check: install
	@scripts/check

clean:
	rm -rf $(VENV) out build dist
