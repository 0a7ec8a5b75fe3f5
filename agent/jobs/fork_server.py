"""Imported by the fork server before torch, so that it ends with the process that started it, also while it imports."""

from collectives.bench.processes import die_with_parent

die_with_parent()
