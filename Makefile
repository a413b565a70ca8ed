# Two commands do everything: `make demo` and `make test`. Each sets up what it needs first.
PYTHON := .venv/bin/python
# What is written for the MCP SDK 1.x: checked against that SDK.
MCP1 := examples/mcp_v1_server.py tests/support/mcp_client_v1.py tests/support/mcp_sse_app.py

.PHONY: setup setup-mcp1 demo test test-long soak check format bench model clean

# The script knows when there is nothing to do.
setup:
	@sh scripts/setup.sh

# The MCP SDK 1.x, for the tests that drive its servers and clients beside 2.x.
setup-mcp1:
	@sh scripts/setup.sh mcp1

# Less to install than for the tests.
demo:
	@sh scripts/setup.sh demo
	@.venv/bin/homing demo

# COVERAGE=1 measures branch coverage too, which makes the processes slower.
test: setup setup-mcp1
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "not long" $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

# Everything that `make test` runs, and what takes too long for it.
test-long: setup setup-mcp1
	$(PYTHON) -m pytest --timeout=1200

# Load and faults on real workers: every promise kept, everything back at the end. SEED= repeats what clients and faults do.
SECONDS := 60
SEED :=
soak: setup
	$(PYTHON) -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

check: setup setup-mcp1
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy --python-executable .venv-mcp1/bin/python $(MCP1)
	.venv/bin/lint-imports

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# Median of a few interleaved rounds; figures that are quoted come from `make bench ROUNDS=15` on a quiet machine.
ROUNDS := 5
bench: setup
	$(PYTHON) -m benchmarks.owners.run
	$(PYTHON) -m benchmarks.forwarding.run --rounds $(ROUNDS)

# The ownership protocol as models: minutes, two searches at once of up to 4 GB each. RUNS= names some of them.
RUNS :=
model:
	@sh scripts/setup_spin.sh
	@nice python3 model/check.py $(RUNS)

clean:
	rm -rf .venv .venv-* dist build
