"""Every recorded matrix and topology file gives the verdict its index states."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from topology.formats import TopologyFileError, xml
from topology.formats.text import parse
from topology.render import json_document

CORPUS = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).parents[3] / "shared" / "corpus")) / "topo"
INDEX = CORPUS / "index.json"
XML_INDEX = CORPUS / "nccl_xml" / "index.json"


def entries(index):
    return json.loads(index.read_text()) if index.is_file() else []


pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(not INDEX.is_file(), reason=f"no corpus at {CORPUS}: set TOPOFLIGHT_CORPUS"),
]


@pytest.mark.parametrize("entry", entries(INDEX), ids=lambda entry: entry["file"])
def test_matrix_text(entry):
    node = parse((CORPUS / entry["file"]).read_text(), entry["file"])
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


@pytest.mark.parametrize("entry", entries(XML_INDEX), ids=lambda entry: entry["file"])
def test_nccl_xml(entry):
    node = xml.parse((CORPUS / entry["file"]).read_text(), entry["file"])
    assert (len(node.gpus), len(node.nics)) == (entry["gpus"], entry["nic_pci"])
    bus_ids = {gpu.name: gpu.bus_id for gpu in node.gpus}
    nearest = {bus_ids[n.gpu]: {"level": n.label, "nics": list(n.nics)} for n in node.nearest_nic}
    assert nearest == entry["nearest_nic_per_gpu_busid"]
    if entry["nvlinks_per_gpu"]:
        counts = Counter(str(sum(link.count for link in gpu.nvlinks)) for gpu in node.gpus)
        assert counts == entry["nvlinks_per_gpu"]


@pytest.mark.parametrize("path", sorted((CORPUS / "lookalikes").glob("*")), ids=lambda path: path.name)
def test_lookalikes_are_refused(path):
    with pytest.raises(TopologyFileError, match="line 3: "):
        parse(path.read_text(), path.name)
