"""Start the rank monitor in any training script: Python runs this file at its start where its folder is on the path.

`topoflight run`, `launch --script` and `wrap` put the folder first in PYTHONPATH and set TOPOFLIGHT_RUN to the run's
folder. A sitecustomize of the user's own, which this one hides, is run as well. Nothing here may fail or speak: the
script comes first. The monitor is loaded by its file's place, so that no module of the script can take its name.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


def _run_hidden(here: str) -> None:
    """Run the sitecustomize that would have been run without this one."""
    rest = [one for one in sys.path if os.path.realpath(one or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None:
        _load(spec, "sitecustomize")


def _load(spec: Any, name: str) -> Any:
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module


def _start() -> None:
    file = Path(__file__).resolve().parent.parent / "rank_monitor.py"
    name = "_topoflight_rank_monitor"
    folder = os.environ["TOPOFLIGHT_RUN"]
    if "RANK" in os.environ:  # a rank, and no launcher
        _load(importlib.util.spec_from_file_location(name, file), name).start_on_import(Path(folder))


with contextlib.suppress(Exception):
    _start()
_run_hidden(str(Path(__file__).resolve().parent))
