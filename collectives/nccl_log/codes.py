"""Every problem that the reader of NCCL logs can name: what it means, and the first thing to do (codes.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One code."""

    severity: str  # "info", "warn", "fail"
    message: str
    action: str
    gdr: bool = False  # says only that GPUDirect RDMA is missing: a gate that does not ask for it passes
    ends: bool = False  # the job, or one of its processes, ended by it


CODES: dict[str, Meaning] = {
    code: Meaning(**row)
    for code, row in tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")).items()
}
