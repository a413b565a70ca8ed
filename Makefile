# Two commands do everything: `make demo` and `make test`. Each sets up what it needs first.
PYTHON := .venv/bin/python

.PHONY: setup demo test test-long check format bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements-dev.txt constraints.txt scripts/setup.sh
	sh scripts/setup.sh

demo: setup
	.venv/bin/homing demo

test: setup
	$(PYTHON) -m pytest

check: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# Median of a few interleaved rounds; figures that are quoted come from `make bench ROUNDS=15` on a quiet machine.
ROUNDS := 5
bench: setup
	$(PYTHON) -m benchmarks.owners.run
	$(PYTHON) -m benchmarks.forwarding.run --rounds $(ROUNDS)

clean:
	rm -rf .venv .venv-* dist
