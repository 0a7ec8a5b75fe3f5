# `make run` installs what it needs, checks this host and trains a small model. `make test` runs the linters and the short
# tests, `make test-all` every test of CI. PYTHON is the interpreter that creates the environment (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# In CI, tests that failed run once more by themselves (docs/decisions/0008-ci-runs-a-failure-again.md).
PYTEST := $(BIN)/python tests/again.py
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs
PIP := $(BIN)/pip install -q --no-compile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start the command and ranks thousands of times. Some images disable the cache of compiled modules; enable it.
unexport PYTHONDONTWRITEBYTECODE

# Tests that measure this host, or that hold its benchmark lock, run one at a time (ALONE). Tests with ranks, network
# namespaces, guests, containers, browsers or Prometheus servers wait for most of their time, so four files of them run at
# once on two cores (SHARED). A file runs in one worker and starts its ranks and servers once. The files that take
# longest start first (tests/conftest.py).
ALONE := alone or gpu
SHARED := ranks or netns or rdma or containers or browser or prometheus or long
HEAVY := $(ALONE) or $(SHARED)
SPREAD := --dist loadfile --no-loadscope-reorder

.PHONY: run test test-all test-fast test-short test-rest test-two test-alone test-nightly lint docs pictures golden golden-documents serve bench forecast studies expect e2e clean lock audit sbom image fuzz gpu gpu-env gpu-wheels gpu-older

# compare-networks needs root and Linux. With --if-possible it prints the reason and passes if it cannot run.
run: $(RUNS)
	$(BIN)/topoflight preflight --train
	$(BIN)/topoflight compare-networks --if-possible

# The linters, all tests that start no ranks, namespaces, guests, containers, browsers or Prometheus servers and do not
# import torch, and the few tests marked `real`, which start such parts once. The linters run at the same time as the
# tests, because some tests wait.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint test-short

test-all: test test-rest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# schemathesis draws its requests from sets. With a fixed hash seed they are the same in every run.
test-fast test-short test-two test-alone test-nightly: export PYTHONHASHSEED := 0

test-fast: $(READY)
	$(PYTEST) -q -n 3 $(SPREAD) -m "not ($(HEAVY) or nightly)"

test-short: $(READY)
	$(PYTEST) -q -n 3 $(SPREAD) -m "(not ($(HEAVY)) or real) and not nightly"

# With --keep-going (as in CI) a failed tier does not stop the next one, and make fails at the end. The documentation site
# is built by tests/agent/test_docs_commands.py, with the recipe of `docs`.
test-rest: test-two test-alone

test-two: $(READY)
	$(PYTEST) -q -n 4 $(SPREAD) -m "($(SHARED)) and not ($(ALONE) or real or nightly)"

test-alone: $(READY)
	$(PYTEST) -q -m "($(ALONE)) and not (real or nightly)"

# The documentation site in reports/site. A broken link or anchor, or a page that is not in the navigation, is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)
	$(BIN)/mkdocs build --strict

# Write the pictures of the pages and of the terminal again (docs/pictures). Needs Debian's chromium.
pictures: $(READY)
	TOPOFLIGHT_UPDATE_PICTURES=1 $(BIN)/pytest -q -n 0 tests/browser/test_page_in_browser.py -k test_pictures

# Tests that take hours and are not part of CI: long fuzzing, image builds, the page of published runs, every recommended
# layout, every combination of a machine and an endpoint.
test-nightly: export TOPOFLIGHT_TRACE := all
test-nightly: export TOPOFLIGHT_PAIRS := all
test-nightly: $(READY)
	$(PYTEST) -q -m "nightly"
	$(PYTEST) -q tests/finetune/test_finetune_traced.py tests/agent/test_http.py tests/probes/test_gpu_unread.py tests/browser
	$(BIN)/python bench/fuzz.py --seconds 3600

# Rewrite every golden file. Read the difference before you commit it.
golden: $(READY)
	TOPOFLIGHT_UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 2 -m "not ($(HEAVY) or nightly)" -k "golden or openapi_is"

# Write the long documents whose digests are in the goldens into OUT. Run it before and after a change, then use diff -r.
golden-documents: $(READY)
	TOPOFLIGHT_GOLDEN_DOCUMENTS=$(abspath $(OUT)) $(BIN)/pytest -q -n 2 -m "not ($(HEAVY) or nightly)" -k "golden or openapi_is"

# Tests against the API server of KUBECONFIG. They need an administrator's credentials and change the cluster
# (docs/measurements/cluster.md). Without KUBECONFIG the same tests use the stand-in API server.
e2e: $(READY)
	$(BIN)/pytest -q -rs tests/e2e tests/agent/test_deploy_manifests.py

serve: $(RUNS)
	$(BIN)/topoflight serve

# Run the benches one after another (about ten minutes) and write their figures to reports/bench.md, or to PAGE. Compare
# figures only within one run.
BENCHES := "footprint.py" "speed.py" "forecast.py"
bench: $(READY)
	@mkdir -p reports
	@{ printf '# Figures of one run\n\n%s, %s cores (%s), %s\n' "$$(date -u +%F)" "$$(nproc)" \
		"$$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)" "$$($(BIN)/python -V)"; \
	for words in $(BENCHES); do printf '\n## `python bench/%s`\n\n' "$$words"; \
		$(BIN)/python bench/$$words || echo "Exit code $$?: the benchmark failed, or exceeded one of its own limits."; \
	done; } | tee $(or $(PAGE),reports/bench.md)

# Compare the forecast with published runs. Each source is left out of the fit that forecasts it. With ROWS=FILE.csv the
# rows of the file are scored with the shipped constants instead.
forecast: $(READY)
	$(BIN)/python bench/forecast.py $(ROWS)

# Forecast published studies row by row with the shipped constants (docs/measurements/studies.md).
studies: $(READY)
	$(BIN)/python bench/studies.py

# Compare the expected bus bandwidths with published results (docs/reference/bus-bandwidth.md).
expect: $(READY)
	$(BIN)/python bench/expect.py $(ROWS)

# Write the lock files again from pyproject.toml. UPGRADE=1 takes the newest versions (locks/README.md).
lock: .cache/tools/uv/bin/uv
	locks/write.sh $< $(if $(UPGRADE),--upgrade)

# Check all locked packages for known vulnerabilities. --strict: a package that cannot be checked is an error.
audit: .cache/tools/pip-audit/bin/pip-audit
	$< --strict --require-hashes --disable-pip -r locks/dev.txt

# The agent's bill of materials (CycloneDX) in reports/sbom.cdx.json, and the licences in docs/reference/licences.md.
sbom: $(READY)
	$(BIN)/python locks/inventory.py --sbom reports/sbom.cdx.json --licences docs/reference/licences.md

# The agent's image, and its bill of materials (CycloneDX) in reports/. BASE names another base image with Python 3.11 or
# newer.
image: VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image:
	podman build $(if $(BASE),--build-arg PYTHON_IMAGE=$(BASE)) -f deploy/images/Containerfile.agent -t topoflight:$(VERSION) .
	mkdir -p reports
	podman run --rm --network none -v $(CURDIR)/locks:/src/locks:ro --entrypoint python topoflight:$(VERSION) \
		/src/locks/inventory.py --sbom /dev/stdout > reports/topoflight-$(VERSION).cdx.json

# The GPU tests on one NVIDIA GPU, with this machine's Python and torch. Nothing is downloaded. If the folder WHEELS exists,
# its packages take precedence over those of the machine. Writes docs/measurements/gpu.md.
gpu: gpu-env
	.venv-gpu/bin/python bench/gpu.py

# If PYTHON is itself in a virtual environment, --system-site-packages does not include the packages of that environment.
# The file machine.pth adds them.
WHEELS ?= .cache/wheels
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
gpu-env:
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	$(PYTHON) -c '$(PURELIB)' > $$(.venv-gpu/bin/python -c '$(PURELIB)')/machine.pth
	[ ! -d $(WHEELS) ] || .venv-gpu/bin/pip install -q --no-index --no-deps --no-compile $(WHEELS)/*.whl

# Download what the GPU tests need besides torch, for a machine without a package index. FOR=3.12 selects the wheels of
# another Python version.
gpu-wheels:
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: $(if $(FOR),--python-version $(FOR)) -d $(WHEELS) \
		-r locks/image.txt

# The part of the GPU tests that a CPU can run, under another Python and an older torch. PyPI has this torch only for CUDA
# (4.7 GB with its libraries); it also runs on a CPU.
OLDER := .cache/older
gpu-older: PY := python3.12
gpu-older:
	$(PY) -m venv $(OLDER)
	$(OLDER)/bin/pip install -q torch==2.11.0
	$(OLDER)/bin/pip install -q --no-deps --only-binary=:all: -r locks/image.txt
	$(OLDER)/bin/python bench/gpu.py --cpu --page $(OLDER)/gpu.md

# One minute of fuzzing. docs/measurements/fuzz.md has the command of the long run.
fuzz: $(READY)
	$(BIN)/python bench/fuzz.py --seconds 60

.cache/tools/uv/bin/uv: VERSION := 0.13.8
.cache/tools/pip-audit/bin/pip-audit: VERSION := 2.10.1
.cache/tools/%:
	$(PYTHON) -m venv .cache/tools/$(notdir $@)
	.cache/tools/$(notdir $@)/bin/pip install -q $(notdir $@)==$(VERSION)

clean:
	rm -rf $(VENV) .venv-gpu .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis reports

# The packages that `make run` needs. All are pinned by hash in the lock files, except torch: its file differs from machine
# to machine, so only its version is pinned (locks/README.md). torch is installed at the same time as the others, because
# unpacking it takes as long as all others together. Modules are compiled when they are first imported.
$(RUNS): pyproject.toml locks/finetune.txt locks/build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, %s is %d.%d; set PYTHON=" % (sys.executable, *sys.version_info[:2]))'
	@echo "-- environment: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "-- packages: torch, and $$(grep -c == locks/finetune.txt) more"
	@$(PIP) --no-deps torch==2.13.0 & torch=$$!; \
		$(PIP) --no-deps --require-hashes -r locks/finetune.txt -r locks/build.txt || { kill $$torch; exit 1; }; \
		echo "-- packages: waiting for torch"; wait $$torch
	@$(PIP) torch==2.13.0
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# The packages that the tools and tests need in addition.
$(READY): $(RUNS) locks/dev.txt
	$(PIP) --no-deps --require-hashes -r locks/dev.txt
	@touch $@
