"""What matrices of `nvidia-smi topo -m` and files of NCCL say: tests/golden/topology.jsonl has a text a line.

Each text stands with the whole node that is read from it and what is found on that, or with the refusal. The XML has
GPUs with and without `sm`, ports that NCCL joined, hosts beside each other and what is unsafe to read; the matrices
are of every form and every damage that was seen. `TOPOFLIGHT_UPDATE_GOLDEN=1` rewrites what they say; a new row needs
`what`, `text` and, of XML, `xml`. Read the difference.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from topology.check import check
from topology.formats import TopologyFileError, text, xml
from topology.graph import GpuNode, NicNode, NodeTopology, Pair
from topology.paths import with_expectations

FILE = Path(__file__).parents[1] / "golden" / "topology.jsonl"


def device(one: GpuNode | NicNode) -> dict[str, Any]:
    """The name, and every field that is not its type's default."""
    known = {each.name: getattr(one, each.name) for each in fields(one) if getattr(one, each.name) != each.default}
    if links := known.pop("nvlinks", ()):
        known["nvlinks"] = [f"{link.count} to {link.kind} {link.bus_id}" for link in links]
    return known


def pair(one: Pair) -> str:
    """ "GPU0 GPU1 NV4 NVL, 4 NVLinks, 82.4 GB/s, line 2 of sample"."""
    rates = (one.bytes_per_second, one.running_bytes_per_second)
    words = (
        f"{one.a} {one.b} {one.label} {one.path and one.path.name}",
        f"{one.nvlinks} NVLinks" if one.nvlinks else "",
        " now ".join(f"{rate / 1e9:.4g} GB/s" for rate in rates if rate),
        one.evidence,
    )
    return ", ".join(filter(None, words))


def told(node: NodeTopology) -> dict[str, Any]:
    """Everything that the node says, what follows from it in short words, and what is found on it."""
    said = {
        "gpus": [device(gpu) for gpu in node.gpus],
        "nics": [device(nic) for nic in node.nics],
        "pairs": [pair(one) for one in node.pairs],
        "islands": [[*island.gpus, island.all_to_all, *island.nvlinks_per_pair] for island in node.islands],
        "nearest": [[near.gpu, near.label, *near.nics, near.decidable, near.why] for near in node.nearest_nic],
        "rails": [[*rail.nics, *rail.gpus] for rail in node.rails],
        "plans": {
            f"{each.scope} {each.op}": each.busbw_bytes_per_second for each in with_expectations(node).expectations
        },
        "virtual": node.virtual,
        "source": node.source,
        "warnings": node.warnings,
        "findings": [[each.code, each.status, each.subject, each.message, *each.evidence] for each in check(node)],
    }
    return {name: value for name, value in said.items() if value}


def test_what_a_text_says() -> None:
    """A row says what it shows: two that differ in one fact stand beside each other."""
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    made = []
    for row in rows:
        try:
            says: Any = told((xml if row.get("xml") else text).parse(row["text"], "sample"))
        except TopologyFileError as error:
            says = [error.source, error.line, str(error)]
        made.append(row | {"says": json.loads(json.dumps(says))})
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        FILE.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
        return
    wrong = [(row["what"], row.get("says"), new["says"]) for row, new in zip(rows, made, strict=True) if row != new]
    assert wrong == []
