"""What matrices of `nvidia-smi topo -m` and files of NCCL say, by golden/topology.jsonl and by the corpus."""

import json
from collections import Counter
from dataclasses import fields

import pytest
from rigs.tables import corpus_folder, each_row, golden_rows

from topology.check import check
from topology.formats import TopologyFileError, text, xml
from topology.formats.text import parse
from topology.graph import GpuNode, NicNode, NodeTopology, Pair
from topology.paths import with_expectations
from topology.render import json_document


def device(one: GpuNode | NicNode) -> dict:
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


def row_of(node: NodeTopology) -> dict:
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


def said(row: dict):
    """What is read of a row's text, or the error that refuses it."""
    try:
        return row_of((xml if row.get("xml") else text).parse(row["text"], "sample"))
    except TopologyFileError as error:
        return [error.source, error.line, str(error)]


def test_golden_texts() -> None:
    """A row says what it shows: two that differ in one fact are next to each other."""
    golden_rows("topology.jsonl", "says", said)


def indexed(name):
    """The rows of an index of the corpus."""
    return json.loads((corpus_folder() / "topo" / name).read_text())


@pytest.mark.corpus
@each_row("entry", lambda: indexed("index.json"), ids=lambda entry: entry["file"])
def test_matrix_text(corpus, entry):
    node = parse((corpus / "topo" / entry["file"]).read_text(), entry["file"])
    document = json_document(node)
    verdict = entry["verdict"]
    assert document["pairs_by_class"]["gpu_gpu"] == entry["gpu_pairs"]
    assert document["islands"] == verdict["nvlink_islands"]
    assert [gpu["name"] for gpu in document["gpus"]] + [nic["label"] for nic in document["nics"]] == entry["columns"]
    assert node.source.endswith(verdict["matrix"])
    seen = document["nearest_nic"] and {
        gpu: {"level": near["label"], "nics": near["nics"], "names": near["names"], "local": near["local"]}
        for gpu, near in document["nearest_nic"].items()
    }
    assert seen == verdict["nearest_nic"]
    affinity = {
        gpu["name"]: {"cpu": gpu["cpu_affinity"], "numa": gpu["numa_affinity"], "gpu_numa_id": gpu["gpu_numa_id"]}
        for gpu in document["gpus"]
    }
    assert affinity == entry["affinity"]


@pytest.mark.corpus
@each_row("entry", lambda: indexed("nccl_xml/index.json"), ids=lambda entry: entry["file"])
def test_nccl_xml(corpus, entry):
    node = xml.parse((corpus / "topo" / entry["file"]).read_text(), entry["file"])
    assert (len(node.gpus), len(node.nics)) == (entry["gpus"], entry["nic_pci"])
    bus_ids = {gpu.name: gpu.bus_id for gpu in node.gpus}
    nearest = {bus_ids[n.gpu]: {"level": n.label, "nics": list(n.nics)} for n in node.nearest_nic}
    assert nearest == entry["nearest_nic_per_gpu_busid"]
    if entry["nvlinks_per_gpu"]:
        counts = Counter(str(sum(link.count for link in gpu.nvlinks)) for gpu in node.gpus)
        assert counts == entry["nvlinks_per_gpu"]


@pytest.mark.corpus
@each_row("path", lambda: sorted((corpus_folder() / "topo" / "lookalikes").glob("*")))
def test_lookalikes_are_refused(path):
    with pytest.raises(TopologyFileError, match="line 3: "):
        parse(path.read_text(), path.name)
