"""The fake NVML, built once, and a machine that answers through it."""

import json
import shutil
from pathlib import Path

import nvml_profile
import pytest
from rigs.recorded import path_of

from probes.gpu.probe import PROBE
from probes.scanner import Scanner


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the fake libnvidia-ml.so.1."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) to build the fake NVML with")
    return nvml_profile.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def recording():
    """A recording's content by its name."""
    return lambda name: json.loads(path_of(name).read_text(encoding="utf-8"))


@pytest.fixture
def scanner_of(fake_nvml, tmp_path, monkeypatch, recording):
    """A scanner whose child process finds a recorded machine's GPUs through the fake NVML, with failures on demand."""

    def make(name: str, inject: str = "", nvml: dict[str, dict] | None = None, **options) -> Scanner:
        """`nvml` are answers instead of recorded ones, by symbol and question."""
        answers = recording(name)["answers"]
        for symbol, told in (nvml or {}).items():
            answers["nvml"][symbol] = answers["nvml"].get(symbol, {}) | told
        profile, root = tmp_path / "profile", tmp_path / "root"
        profile.write_text(nvml_profile.profile(answers["nvml"]), encoding="utf-8")
        nvml_profile.restore_files(answers, root)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml))
        monkeypatch.setenv("FAKE_NVML_PROFILE", str(profile))
        monkeypatch.setenv("FAKE_NVML_INJECT", inject)
        return Scanner(str(root), **{"probes": (PROBE,), **options})

    return make
