"""An interpreter that has TRL: this environment's packages with a few more on top, in .cache/compare."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "compare"


def trl_python() -> str:
    """Return its path, made at the first call. CalledProcessError or OSError where TRL cannot be installed."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
        packages = next((FOLDER / "lib").glob("python*/site-packages"))
        below = [path for path in sys.path if path.endswith("site-packages")]  # pip, which finds no torch, brings one
        (packages / "below.pth").write_text("\n".join(below) + "\n")
    if subprocess.run([python, "-c", "import trl"], capture_output=True).returncode:
        wanted = ["trl==1.16.0", "accelerate", "datasets>=4.7"]
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    return str(python)
