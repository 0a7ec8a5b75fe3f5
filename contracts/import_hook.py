"""Act on a module of a training script once Python has imported it.

This file also runs in Python environments that have nothing of Topoflight, where it is loaded by its path, so it needs
the standard library alone.
"""

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any


class AfterImport:
    """A finder that runs `action` on one module after its import. What `action` raises does not disturb the script."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self.name, self.action = name, action
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the module as Python does, to be run and then acted on; nothing else."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                with contextlib.suppress(Exception):
                    self.action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
