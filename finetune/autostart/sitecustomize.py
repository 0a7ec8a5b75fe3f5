"""Start the rank monitor in any training script: Python runs this file at its start where its folder is on the path.

`topoflight run` and `launch --script` put the folder first in PYTHONPATH and set TOPOFLIGHT_RUN to the run's folder. A
sitecustomize of the user, which this one hides, is run as well. Nothing here may raise an error or print, because that
would disturb the script. The monitor is loaded by its path, so that no module of the script can take its name.
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


class _StartOnImport:
    """Wraps init_process_group once torch.distributed is imported, so that the monitor starts after it.

    Whether a process is a rank is known only then: some launchers set RANK in the environment, others nowhere.
    """

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find torch.distributed.distributed_c10d as Python does, to be run with the wrapper; nothing else."""
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                with contextlib.suppress(Exception):
                    _wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(c10d: Any) -> None:
    """Load the monitor, and have init_process_group start it."""
    name, file = "_topoflight_rank_monitor", Path(__file__).resolve().parent.parent / "rank_monitor.py"
    monitor = _load(importlib.util.spec_from_file_location(name, file), name)
    c10d.init_process_group = monitor.starting(c10d.init_process_group, Path(os.environ["TOPOFLIGHT_RUN"]))


if "TOPOFLIGHT_RUN" in os.environ:
    sys.meta_path.insert(0, _StartOnImport())
_run_hidden(str(Path(__file__).resolve().parent))
