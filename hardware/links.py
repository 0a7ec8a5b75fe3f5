"""Links between GPUs by generation, and what NCCL plans for one; `links.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hardware.tables import pair, read
from hardware.units import GIGA


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One generation of NVLink or xGMI; rates of one link in one direction."""

    name: str
    source: str
    bytes_per_second: float  # on the wire
    most: int  # links of one GPU, at most
    capability: tuple[int, int] | None = None  # the first CUDA compute capability that has it; None: not NVIDIA's
    only: bool = False  # no later capability has it
    nccl_bytes_per_second: float | None = None  # payload that NCCL plans for; None: not NCCL's


@cache
def links() -> tuple[Link, ...]:
    """Every row, the newest first."""
    made = []
    for row in map(dict, read("links")):
        plan = row.pop("nccl_gb_per_second", None)
        made.append(
            Link(
                bytes_per_second=row.pop("gb_per_second") * GIGA,
                nccl_bytes_per_second=plan * GIGA if plan is not None else None,
                capability=pair(row.pop("capability", None)),
                **row,
            )
        )
    return tuple(made)


def nvlink(capability: tuple[int, int]) -> Link | None:
    """The generation whose rate NCCL plans with for a compute capability; None before the first."""
    known = ((link, link.capability) for link in links() if link.capability is not None)
    return next((link for link, first in known if capability == first or (capability > first and not link.only)), None)


@cache
def most_links() -> int:
    """NVLinks that any GPU has: more in sum over its peers means that a switch shares them."""
    return max(link.most for link in links())


def link_named(name: str) -> Link:
    """A row by its name. Raises LookupError for one that the table does not have."""
    return next(link for link in links() if link.name == name)
