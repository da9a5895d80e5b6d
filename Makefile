# What the README says first and what CI calls. The logic lies in ci/*.sh.
#
# Variables: TORCH   pip's arguments for torch, or "system" for the interpreter's own; see ci/env.sh
#            PYTHON  the interpreter that makes the environment, python3
#            JOBS    pytest processes, 2
#            ARGS    more arguments for pytest, or for m3-hw

.PHONY: parity test venv lint bench certify packaging clean

parity: venv ## run the parity harness on this machine's hardware; leaves build/parity.html
	@bash ci/parity.sh $(ARGS)

test: venv ## lint, types and tests
	@bash ci/test.sh lint types pytest $(ARGS)

venv: ## the environment .venv; made anew when pyproject.toml, TORCH or PYTHON changes
	@bash ci/env.sh

lint: venv
	@bash ci/test.sh lint types

bench: venv
	@.venv/bin/m3-hw bench $(ARGS)

certify: venv ## random cases per operator; resumes where it stopped
	@bash ci/certify.sh $(ARGS)

packaging: venv ## sdist, wheel built from it, and a clean environment that imports and runs it
	@bash ci/packaging.sh

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
