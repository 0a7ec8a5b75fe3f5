# Two commands do all the set-up: `make run` flies the whole way on this host, `make test` runs every check.
# PYTHON names the interpreter to build the environment with (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# tiers that start processes, namespaces, guests or browsers run one after another: they measure or are heavy
HEAVY := ranks or netns or rdma or browser or prometheus or kube or gpu

.PHONY: run test test-fast test-heavy lint golden serve bench forecast e2e clean

run: $(READY)
	$(BIN)/topoflight preflight --fly

test: lint test-fast test-heavy

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-fast: $(READY)
	$(BIN)/pytest -q -n 2 -m "not ($(HEAVY))"

test-heavy: $(READY)
	$(BIN)/pytest -q -m "$(HEAVY)"

# rewrite every golden file; read the difference before you commit it
golden: $(READY)
	TOPOFLIGHT_UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 2 -m "not ($(HEAVY))" -k golden

# against the API server of KUBECONFIG, an administrator's, of a cluster that may be changed (docs/kubernetes.md);
# without KUBECONFIG the same conversations with the stand-in
e2e: $(READY)
	$(BIN)/pytest -q -rs tests/e2e tests/agent/test_deploy_manifests.py

serve: $(READY)
	$(BIN)/topoflight serve

forecast: $(READY)
	$(BIN)/python bench/forecast.py $(ROWS)

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis reports

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, %s is %d.%d; set PYTHON=" % (sys.executable, *sys.version_info[:2]))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -e '.[finetune,dev]'
	@touch $@
