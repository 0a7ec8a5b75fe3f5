"""Packages of npm for tests: what a package-lock.json pins, unpacked into .cache; nothing of them is run to install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def apt_install(*packages: str) -> None:
    """Debian packages where this process may; the caller looks whether it worked."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", "-q", *command], env=environment, timeout=600, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def installed(source: Path, cache: str) -> Path:
    """The `node_modules` that the lock file in `source` asks for; skips the test where npm cannot be had."""
    folder = ROOT / ".cache" / cache
    lock = "package-lock.json"
    same = (folder / lock).exists() and (folder / lock).read_bytes() == (source / lock).read_bytes()
    if same and (folder / "node_modules").exists():
        return folder / "node_modules"
    if shutil.which("npm") is None:
        apt_install("npm")
    if shutil.which("npm") is None:
        pytest.skip("no npm, and it could not be installed (needs root and apt): apt-get install npm")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", lock):
        shutil.copy(source / name, folder / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=300, capture_output=True)
    return folder / "node_modules"
