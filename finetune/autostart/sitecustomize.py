"""Start the rank monitor in any training script: Python runs this file at startup if its folder is on sys.path.

`topoflight run` and `launch --script` put the folder first in PYTHONPATH and set TOPOFLIGHT_RUN to the run's folder.
`launch --script` also sets TOPOFLIGHT_SCRIPT to the script, whose ranks report their steps and their error. A
sitecustomize of the user, which this one hides, is also run. This code must not raise an error or print, because that
would disturb the script. The monitor is loaded by path, so that no module of the script can shadow it.
"""

from __future__ import annotations  # in an older Python of the user an annotation would be an error

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _AfterImport:
    """A meta path finder that calls the action of a module right after its import. Errors of an action are ignored."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find only these modules, as Python's own finders do, with a loader that calls the action after execution."""
        action = self.actions.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if action else None
        if action and spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                with contextlib.suppress(Exception):
                    action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_hidden(here: str) -> None:
    """Run the sitecustomize that Python would have run without this one."""
    rest = [one for one in sys.path if os.path.realpath(one or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None:
        _load(spec, "sitecustomize")


def _load(spec: Any, name: str) -> Any:
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module


def _load_file(name: str, file: str) -> Any:
    return _load(importlib.util.spec_from_file_location(name, Path(__file__).resolve().parents[2] / file), name)


def _wrap(module: Any) -> None:
    """Load the monitor, and let init_process_group, or torchrun's launch_agent, start it.

    Only that call shows whether a process is a rank: some launchers set RANK in the environment, others do not.
    """
    monitor = _load_file("_topoflight_rank_monitor", "finetune/rank_monitor.py")
    for name, wrapped in (("init_process_group", monitor.starting), ("launch_agent", monitor.launching)):
        if hasattr(module, name):
            setattr(module, name, wrapped(getattr(module, name), Path(os.environ["TOPOFLIGHT_RUN"])))


if "TOPOFLIGHT_RUN" in os.environ:
    with contextlib.suppress(Exception):
        actions: dict[str, Callable[[Any], None]] = dict.fromkeys(
            ("torch.distributed.distributed_c10d", "torch.distributed.launcher.api"), _wrap
        )
        if "RANK" in os.environ and sys.orig_argv[1:2] == [os.environ.get("TOPOFLIGHT_SCRIPT")]:
            script_rank = _load_file("_topoflight_script_rank", "agent/jobs/script_rank.py")
            actions["torch.optim.optimizer"] = script_rank.start()
        sys.meta_path.insert(0, _AfterImport(actions))
_run_hidden(str(Path(__file__).resolve().parent))
