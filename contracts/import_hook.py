"""Run a callback on a module of a training script right after Python imported the module.

This file is also loaded by path into Python environments without Topoflight, so it uses only the standard library.
"""

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any


class AfterImport:
    """A meta path finder that calls `action` with one module after its import. Exceptions of `action` are ignored."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self.name, self.action = name, action
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find only this module, as Python's own finders do, with a loader that calls `action` after execution."""
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
