# To begin with: `make demo` shows it, `make test` and `make check` are what a change has to pass. Every target sets up what it needs first.
PYTHON := .venv/bin/python
# What is written for the MCP SDK 1.x: checked against that SDK.
MCP1 := examples/mcp_v1_server.py tests/support/mcp_client_v1.py tests/support/mcp_sse_app.py

# What is written for Gradio and NiceGUI.
ECOSYSTEM := examples/gradio_ledger.py examples/nicegui_counter.py tests/support/gradio_driver.py

# Some images forbid Python to keep bytecode: every process that the tests start would compile homing anew, which is a third of
# the CPU time of a server's start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench-instructions setup setup-mcp1 setup-ecosystem setup-docs setup-web setup-browsergym demo demo-web test test-long test-ecosystem soak soak-web fuzz docs check format bench bench-rl bench-web model clean demo-rl

# The script knows when there is nothing to do.
setup:
	@sh scripts/setup.sh

# The MCP SDK 1.x, for the tests that drive its servers and clients beside 2.x.
setup-mcp1:
	@sh scripts/setup.sh mcp1

# Gradio and NiceGUI, for the tests that drive real apps of theirs.
setup-ecosystem:
	@sh scripts/setup.sh ecosystem

setup-docs:
	@sh scripts/setup.sh docs

# Less to install than for the tests.
demo:
	@sh scripts/setup.sh demo
	@.venv/bin/homing demo

# Episodes through four servers of four workers each.
demo-rl:
	@sh scripts/setup.sh demo-rl
	@.venv/bin/homing rl demo

# MiniWoB in real browsers on two workers; as root on Debian it installs a Chromium if there is none.
demo-web:
	@sh scripts/setup.sh demo-web
	@.venv/bin/homing web demo

# A Chromium for the tests in real browsers, which are skipped without one.
setup-web:
	@sh scripts/setup.sh web

# The peer of benchmarks/web, in an environment of its own; without it that benchmark leaves the peer out, and says so.
setup-browsergym:
	@sh scripts/setup.sh browsergym

# More processes than CI has cores: a good part of the time is waiting. COVERAGE=1 measures branch coverage too, which makes
# the processes slower.
test: setup setup-mcp1 setup-web
	$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long and not ecosystem" $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

# Everything that `make test` runs, and what takes too long for it.
test-long: setup setup-mcp1 setup-web
	$(PYTHON) -m pytest --timeout=1200 -m "not ecosystem"

# Real Gradio and NiceGUI apps, which take half a gigabyte to install.
test-ecosystem: setup setup-ecosystem setup-web
	.venv/bin/mypy --python-executable .venv-ecosystem/bin/python $(ECOSYSTEM)
	$(PYTHON) -m pytest -m ecosystem tests/ecosystem tests/test_docs.py

# The site of the docs, into build/site; anything that does not fit together is an error.
docs: setup-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir build/site

# Load and faults on real workers: every promise kept, everything back at the end. SEED= repeats what clients and faults do;
# WRITE=1 renews benchmarks/soak/results.md.
SECONDS := 60
SEED :=
PLAYERS :=
WRITE :=
soak: setup
	$(PYTHON) -m benchmarks.soak.run --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) \
		$(if $(PLAYERS),--players $(PLAYERS)) $(if $(WRITE),--write)

# Browser sessions in real browsers under seeded faults, about 25 minutes: nothing left, no fault scored as a reward. SEED= repeats
# one; FAKES=1 takes processes that are no browsers, in a quarter of the time; WRITE=1 renews benchmarks/web/faults.md.
FAULTS := 2000
FAKES :=
soak-web: setup setup-web
	$(PYTHON) -m tests.soak_web --faults $(FAULTS) $(if $(FAKES),,--chromium --slices 8) $(if $(SEED),--seed $(SEED)) \
		$(if $(WRITE),--out benchmarks/web/faults)
	$(if $(WRITE),$(PYTHON) -m benchmarks.web.faults)

# Cookies, tokens, frames of the hop and owner records, fuzzed with Atheris, in an environment of its own.
fuzz:
	@sh scripts/setup.sh fuzz
	.venv-fuzz/bin/python -m tests.fuzz --seconds $(SECONDS)

check: setup setup-mcp1
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy --python-executable .venv-mcp1/bin/python $(MCP1)
	.venv/bin/lint-imports

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# The core's figures and goals, medians of interleaved rounds: about a quarter of an hour on a machine that does nothing else.
ROUNDS := 15
bench: setup
	$(PYTHON) -m benchmarks.owners.run
	$(PYTHON) -m benchmarks.bodies.run
	$(PYTHON) -m benchmarks.placement.run
	$(PYTHON) -m benchmarks.forwarding.run --rounds $(ROUNDS) || failed=1; \
		$(PYTHON) -m benchmarks.goals && exit $$failed

# Steps of served environments.
bench-rl: setup
	$(PYTHON) -m benchmarks.rl.run

# Instructions of a local hit with and without what watches it; as good on a busy machine. Needs valgrind.
bench-instructions: setup
	$(PYTHON) -m benchmarks.instructions.run
	$(PYTHON) -m benchmarks.instructions.ways --write

# Browser sessions beside BrowserGym and bare Playwright: eight minutes on a quiet machine. `benchmarks.web.long` has long runs.
bench-web: setup setup-web
	@$(MAKE) --no-print-directory setup-browsergym || true
	$(PYTHON) -m benchmarks.web.run

# The ownership protocol as models: minutes, two searches at once of up to 4 GB each. RUNS= names some of them.
RUNS :=
model:
	@sh scripts/setup_spin.sh
	@nice python3 model/check.py $(RUNS)

clean:
	rm -rf .venv .venv-* dist build
