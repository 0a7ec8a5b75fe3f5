"""The tables of hardware: every row has a source, is of its type and is reached; nothing else keys a table by a GPU."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter
from rigs.tables import PYPROJECT, ROOT, data_of, each_row

from hardware.gpus import find_gpu, find_model, gpus, links, nvlink, refuses_peers, soldered, without_gdr
from hardware.machines import machines as rows
from hardware.nics import fastest, is_efa, is_virtual, models, nics
from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import frontier, recommend

NAMES = data_of(__file__, "gpu_names.yaml")
TABLES = sorted((ROOT / "hardware").glob("*.toml"))
BUILD = PYPROJECT["tool"]["hatch"]["build"]
PACKAGES = BUILD["targets"]["wheel"]["packages"]


@each_row("table", TABLES, ids=lambda path: path.stem)
def test_every_row_has_a_name_of_its_own_and_a_source(table: Path) -> None:
    (rows,) = tomllib.loads(table.read_text()).values()
    assert all(len(row["source"]) > 6 for row in rows)
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)


@each_row("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_a_gpu_is_found_by_its_own_name_and_its_pci_ids(gpu) -> None:
    """A general pattern above a special one would hide it."""
    assert find_gpu(gpu.name) == gpu
    assert all(find_gpu(name) == gpu for name in gpu.pci.values())
    assert all(find_model(0x10DE, number) == (name, gpu.compute_capability) for number, name in gpu.pci.items())


@each_row("row", [*gpus(), *links(), *nics(), *rows()], ids=lambda row: row.name)
def test_a_row_is_of_its_type(row: object) -> None:
    """TOML knows a number from a text; what is in a row is what the record says."""
    for name, kind in get_type_hints(type(row)).items():
        TypeAdapter(kind).validate_python(getattr(row, name), strict=True)


@each_row("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_the_figures_of_a_gpu_are_possible(gpu) -> None:
    """A slip of the comma shows: nothing is measured above 1.15 of the data sheet (a boost clock), no link is extra."""
    assert gpu.matmul_bf16 <= 1.15 * gpu.peak_bf16
    assert 8 * 2**30 <= gpu.memory_bytes <= 512 * 2**30
    assert 0.1e12 <= gpu.hbm_bytes_per_second <= 20e12
    generation = nvlink(gpu.compute_capability) if gpu.compute_capability else None
    if generation and gpu.links:
        assert gpu.links <= generation.most
        assert all(rate <= gpu.links * generation.bytes_per_second for rate in gpu.busbw.values())
    assert gpu.interconnect in ("PCIe", "NVLink", "NVSwitch", "xGMI")
    assert (gpu.compute_capability is None) == (gpu.maker != "NVIDIA")


def test_nccl_plans_below_the_wire() -> None:
    assert all(each.nccl_bytes_per_second < each.bytes_per_second for each in links() if each.nccl_bytes_per_second)


@each_row(("name", "built_with_nvlink", "no_peers", "grace"), NAMES["names"])
def test_what_a_drivers_name_says(name: str, built_with_nvlink: bool, no_peers: bool, grace: bool) -> None:
    assert (soldered(name), refuses_peers(name)) == (built_with_nvlink, no_peers)
    assert bool(find_gpu(name) and find_gpu(name).grace) == grace


def test_gpus_without_gpudirect_rdma() -> None:
    names = ("NVIDIA GeForce RTX 4090", "NVIDIA TITAN RTX", "NVIDIA GB10", "NVIDIA RTX A6000", "NVIDIA GB200")
    assert [without_gdr(name) for name in names] == [True, True, True, False, False]


def test_what_an_adapters_ids_say() -> None:
    """hca_type as sysfs prints it, and the pairs of PCI ids; a family that nobody judged has no rate."""
    named = models()
    assert [named[each] for each in ("MT4129", "MT4116", "MT41692")] == ["ConnectX-7", "ConnectX-4 VF", "BlueField-3"]
    assert (fastest("ConnectX-7"), fastest("ConnectX-6 Lx"), fastest("ConnectX-4 VF")) == (50e9, None, None)
    assert is_efa(0x1D0F, 0xEFA2) and not is_efa(0x15B3, 0x1021)
    assert is_virtual(0x15B3, 0x101E) and not is_virtual(0x15B3, 0x1021)
    numbers = [(nic.vendor, number) for nic in nics() for number in (*nic.devices, *nic.virtual)]
    assert len(set(numbers)) == len(numbers)


@each_row("machine", ["mi300x", "mi325x"])
@each_row("hosts", [1, 2])
def test_what_rccl_serves_is_refused_and_not_guessed(machine: str, hosts: int) -> None:
    """No plan of links, no environment, no layout: the answer says that nothing of it was measured."""
    cluster = machines.cluster(machine, hosts)
    gpus = [gpu for node in cluster.nodes for gpu in node.gpus]
    assert len(gpus) == 8 * hosts and all(gpu.compute_capability is None for gpu in gpus)
    assert not cluster.nodes[0].expectations and not any(pair.bytes_per_second for pair in cluster.nodes[0].pairs)
    answer = recommend(cluster, (), model_named("Llama-3.1-8B"), TrainSpec())
    assert (answer.backend, answer.chosen, answer.settings) == ("rccl", None, ())
    assert "no ceiling of training on it was measured" in answer.unknowns[0]
    (point,) = frontier([machine], [hosts], [None], model_named("Llama-3.1-8B"), TrainSpec(), tokens=1e9)
    assert point.seconds is None and point.reason in answer.unknowns


_MODEL = re.compile(
    r"(?<![-\w])(?:GB\d{2,3}|G?H\d{2,3}|B[123]\d\d|V100|P100|A(?:2|10G?|16|30|40|100|800|6000)|L4|L40S?|T4|MI\d{3}\w?"
    r"|(?:RTX|GTX|TITAN)[ \w]*)\b|\bG?[BH]\[\d+\]00",
    re.IGNORECASE,
)
NO_KEY = {"collectives/nccl_log/messages.py": "GB10"}  # what a log's places give away: the answer of a rule


def _strings(tree: ast.Module) -> list[ast.Constant]:
    """Every string and bytes of the code that is no docstring."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docs
    ]


@each_row("package", [*(each for each in PACKAGES if each != "hardware"), "dashboards"])
def test_no_table_outside_hardware_is_keyed_by_a_gpu(package: str) -> None:
    """A GPU's name in code is a table that was not moved. A sentence may name one."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        where = str(path.relative_to(ROOT))
        for node in _strings(ast.parse(path.read_text())):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            sentence = re.search(r"[a-z]{2,}[,:;]? [a-z]{2,} ", text)
            if _MODEL.search(text) and not sentence and NO_KEY.get(where) != text:
                found.append(f"{where}:{node.lineno}: {text!r:.60}")
    assert found == []


@each_row(("name", "teraflops"), NAMES["peaks"])
def test_a_peak_is_that_of_the_whole_name(name: str, teraflops: float | None) -> None:
    """GB200 is no B200, A10G no A10, and L40 no L4; before Ampere there is no bf16."""
    gpu = find_gpu(name)
    assert gpu is not None and (gpu.peak_bf16 / 1e12 if gpu.bf16 else None) == teraflops


def test_links_of_pairs_that_differ_are_what_the_gpus_have() -> None:
    """A square, the same from both ends, within the NVLinks of one GPU, in the counts that the row names."""
    uneven = [row for row in rows() if row.nvlinks]
    assert "p3.16xlarge" in {row.name for row in uneven}
    for row in uneven:
        counts = {count for line in row.nvlinks for count in line if count}
        assert {len(line) for line in row.nvlinks} == {len(row.nvlinks)} == {row.gpus}
        assert row.nvlinks == tuple(zip(*row.nvlinks, strict=True))
        assert all(row.nvlinks[i][i] == 0 for i in range(row.gpus))
        assert (counts, row.all_to_all) == (set(row.links_per_pair), False)
        gpu = find_gpu(row.gpu)
        assert gpu is not None and all(sum(line) <= gpu.links for line in row.nvlinks)


def test_a_hybrid_cube_mesh_is_planned_as_one() -> None:
    """p3.16xlarge: one or two NVLinks, twelve pairs through a neighbour, and the rings of DGX-1: 120 GB/s."""
    node = machines.get("p3.16xlarge")
    inside = [pair for pair in node.pairs if pair.b.startswith("GPU")]
    assert Counter(pair.label for pair in inside) == {"NV1": 8, "NV2": 8, "SYS": 12}
    assert {pair.path.name for pair in inside if pair.path and not pair.nvlinks} == {"NVB"}
    assert [island.nvlinks_per_pair for island in node.islands] == [("NV1", "NV2")]
    whole = next(e for e in node.expectations if e.op == "all_gather" and "GPU" not in e.scope)
    assert whole.busbw_bytes_per_second == pytest.approx(120e9)
