# Two commands do all the set-up: `make run` goes the whole way on this host, `make test` checks it; `make test-all` is
# every test.
# PYTHON names the interpreter to build the environment with (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# in CI what failed runs once more, alone (docs/decisions/0008)
PYTEST := $(BIN)/python tests/again.py
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs
PIP := $(BIN)/pip install -q --no-compile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# tests start the command and ranks thousands of times: compiled once (some images switch that off)
unexport PYTHONDONTWRITEBYTECODE

# What measures this host or holds its one benchmark lock runs by itself. Ranks, hosts as namespaces, guests, containers,
# browsers and Prometheus servers wait for half of their time: four files of them at once on two cores, each file's
# ranks, servers and recorded machines made once; those that take longest begin first (tests/conftest.py).
ALONE := alone or gpu
SHARED := ranks or netns or rdma or containers or browser or prometheus or long
HEAVY := $(ALONE) or $(SHARED)
SPREAD := --dist loadfile --no-loadscope-reorder

.PHONY: run test test-all test-fast test-short test-rest test-two test-alone test-nightly lint docs pictures golden golden-documents serve bench forecast studies expect e2e clean lock audit sbom image fuzz gpu gpu-env gpu-wheels gpu-older

# compare-networks needs root and Linux; where it cannot, it says why
run: $(RUNS)
	$(BIN)/topoflight preflight --train
	$(BIN)/topoflight compare-networks --if-possible

# what one runs: everything that starts no ranks, namespaces, guests or browsers nor imports torch, and one test of each
# that does but for guests. The linters run beside the tests, some of which wait.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint test-short

test-all: test test-rest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# schemathesis draws its questions from sets: with one seed of hashes, the same in every run
test-fast test-short test-two test-alone test-nightly: export PYTHONHASHSEED := 0

test-fast: $(READY)
	$(PYTEST) -q -n 3 $(SPREAD) -m "not ($(HEAVY) or nightly)"

test-short: $(READY)
	$(PYTEST) -q -n 3 $(SPREAD) -m "(not ($(HEAVY)) or real) and not nightly"

# what failed in one tier hides no other: --keep-going, as CI says, runs them all and fails at the end
test-rest: test-two test-alone docs

test-two: $(READY)
	$(PYTEST) -q -n 4 $(SPREAD) -m "($(SHARED)) and not ($(ALONE) or real or nightly)"

test-alone: $(READY)
	$(PYTEST) -q -m "($(ALONE)) and not (real or nightly)"

# the documentation site, into reports/site; a broken link or anchor, or a page outside the navigation, ends it
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)
	$(BIN)/mkdocs build --strict

# the pictures of the pages and of the terminal, drawn anew (needs Debian's chromium)
pictures: $(READY)
	TOPOFLIGHT_UPDATE_PICTURES=1 $(BIN)/pytest -q -n 0 tests/browser/test_page_in_browser.py -k test_pictures

# what takes hours and is no part of CI: long fuzzing, image builds, the page of published runs,
# every recommended layout, every pair of a machine and an endpoint
test-nightly: export TOPOFLIGHT_TRACE := all
test-nightly: export TOPOFLIGHT_PAIRS := all
test-nightly: $(READY)
	$(PYTEST) -q -m "nightly"
	$(PYTEST) -q tests/finetune/test_finetune_traced.py tests/agent/test_http.py tests/probes/test_gpu_unread.py tests/browser
	$(BIN)/python bench/fuzz.py --seconds 3600

# rewrite every golden file; read the difference before you commit it
golden: $(READY)
	TOPOFLIGHT_UPDATE_GOLDEN=1 $(BIN)/pytest -q -n 2 -m "not ($(HEAVY) or nightly)" -k "golden or openapi_is"

# the long documents whose digests are kept, into OUT: once before a change and once after it, for diff -r
golden-documents: $(READY)
	TOPOFLIGHT_GOLDEN_DOCUMENTS=$(abspath $(OUT)) $(BIN)/pytest -q -n 2 -m "not ($(HEAVY) or nightly)" -k "golden or openapi_is"

# against the API server of KUBECONFIG, an administrator's, of a cluster that may be changed (docs/measurements/cluster.md);
# without KUBECONFIG the same conversations with the stand-in
e2e: $(READY)
	$(BIN)/pytest -q -rs tests/e2e tests/agent/test_deploy_manifests.py

serve: $(RUNS)
	$(BIN)/topoflight serve

# every figure, each bench in turn (some ten minutes), onto reports/bench.md or PAGE; compare within one run only
BENCHES := "footprint.py" "speed.py" "forecast.py"
bench: $(READY)
	@mkdir -p reports
	@{ printf '# Figures of one run\n\n%s, %s cores (%s), %s\n' "$$(date -u +%F)" "$$(nproc)" \
		"$$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)" "$$($(BIN)/python -V)"; \
	for words in $(BENCHES); do printf '\n## `python bench/%s`\n\n' "$$words"; \
		$(BIN)/python bench/$$words || echo "Exit code $$?: the benchmark failed, or exceeded one of its own limits."; \
	done; } | tee $(or $(PAGE),reports/bench.md)

# against published runs: each source left out, or the rows of a file by the model as it ships
forecast: $(READY)
	$(BIN)/python bench/forecast.py $(ROWS)

# published studies, each row forecast by the model as it ships (docs/measurements/studies.md)
studies: $(READY)
	$(BIN)/python bench/studies.py

# how right the expected bus bandwidths are, held against published results (docs/reference/bus-bandwidth.md)
expect: $(READY)
	$(BIN)/python bench/expect.py $(ROWS)

# the locks anew from pyproject.toml; UPGRADE=1 takes the newest versions (locks/README.md)
lock: .cache/tools/uv/bin/uv
	locks/write.sh $< $(if $(UPGRADE),--upgrade)

# known vulnerabilities of everything that is locked; --strict, as a package that nothing is known of must not pass
audit: .cache/tools/pip-audit/bin/pip-audit
	$< --strict --require-hashes --disable-pip -r locks/dev.txt

# what the agent consists of: CycloneDX at reports/sbom.cdx.json, and the licences at docs/reference/licences.md
sbom: $(READY)
	$(BIN)/python locks/inventory.py --sbom reports/sbom.cdx.json --licences docs/reference/licences.md

# the agent's image, and beside it what it consists of (CycloneDX); BASE names another image with Python 3.11 or newer
image: VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
image:
	podman build $(if $(BASE),--build-arg PYTHON_IMAGE=$(BASE)) -f deploy/images/Containerfile.agent -t topoflight:$(VERSION) .
	mkdir -p reports
	podman run --rm --network none -v $(CURDIR)/locks:/src/locks:ro --entrypoint python topoflight:$(VERSION) \
		/src/locks/inventory.py --sbom /dev/stdout > reports/topoflight-$(VERSION).cdx.json

# the GPU tier on one NVIDIA GPU, with this machine's Python and torch; nothing is fetched: packages are the machine's, over
# them those in WHEELS where that folder is. Writes docs/measurements/gpu.md
gpu: gpu-env
	.venv-gpu/bin/python bench/gpu.py

# the machine's Python may be of a virtual environment itself, whose packages --system-site-packages does not show
WHEELS ?= .cache/wheels
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
gpu-env:
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	$(PYTHON) -c '$(PURELIB)' > $$(.venv-gpu/bin/python -c '$(PURELIB)')/machine.pth
	[ ! -d $(WHEELS) ] || .venv-gpu/bin/pip install -q --no-index --no-deps --no-compile $(WHEELS)/*.whl

# all that the tier needs beside torch, for a machine that reaches no index; FOR=3.12 for another Python than this one
gpu-wheels:
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: $(if $(FOR),--python-version $(FOR)) -d $(WHEELS) \
		-r locks/image.txt

# the tier's CPU-able part under an older Python and torch, where they can be installed: PyPI has this torch for
# CUDA alone, 4.7 GB with its libraries, which a CPU loads too
OLDER := .cache/older
gpu-older: PY := python3.12
gpu-older:
	$(PY) -m venv $(OLDER)
	$(OLDER)/bin/pip install -q torch==2.11.0
	$(OLDER)/bin/pip install -q --no-deps --only-binary=:all: -r locks/image.txt
	$(OLDER)/bin/python bench/gpu.py --cpu --page $(OLDER)/gpu.md

# a minute of fuzzing; docs/measurements/fuzz.md has the long run's command
fuzz: $(READY)
	$(BIN)/python bench/fuzz.py --seconds 60

.cache/tools/uv/bin/uv: VERSION := 0.13.8
.cache/tools/pip-audit/bin/pip-audit: VERSION := 2.10.1
.cache/tools/%:
	$(PYTHON) -m venv .cache/tools/$(notdir $@)
	.cache/tools/$(notdir $@)/bin/pip install -q $(notdir $@)==$(VERSION)

clean:
	rm -rf $(VENV) .venv-gpu .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis reports

# What running needs: everything by hash from the locks; torch by version only, as each machine has its own file of it
# (locks/README.md), at the same time, as unpacking it takes as long as all others. Modules are compiled as they are used.
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

# and the tools and tests
$(READY): $(RUNS) locks/dev.txt
	$(PIP) --no-deps --require-hashes -r locks/dev.txt
	@touch $@
