"""Builds the recordings of this folder that no one could capture: `python tests/machines/build.py [--check]`.

The machines are described in machines.yaml: a PCI tree, GPUs, RDMA devices and interfaces, with the source of their
shape. The probes are run on each, and what they asked is the recording. `--check` writes nothing and fails where a
file differs from what would be written.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from machine_built import BuiltHost, Cpu, Machine, cpus_of, write_host
from machine_nvml import BOARDS, PARTS, NvmlAnswers, NvmlGpu, fabric
from machine_tree import IB_COUNTERS, MELLANOX, NVIDIA, ROCE_HW_COUNTERS, Dev, Netdev, Rdma, Tree, port, switch
from scanned import scan

from probes.host.protocol import Host, Json
from probes.host.recording import RecordingHost
from probes.scanner import dumps, pack_archive

FOLDER = Path(__file__).parent
Row = dict[str, Any]
ROWS: dict[str, Row] = yaml.safe_load((FOLDER / "machines.yaml").read_text("utf-8"))

CPUS = {
    name: Cpu(**{**row, "memory_only_nodes": tuple(row.get("memory_only_nodes", ()))})
    for name, row in PARTS["cpus"].items()
}
SPR, GRACE = CPUS["SPR"], CPUS["GRACE"]
LOOPBACK = Netdev(name="lo", index=1, mtu=65536, mac="00:00:00:00:00:00", addresses=("127.0.0.1/8",), type=772)


def gpu(bus_id: str, device: int, *, generation: int = 5, **more: Any) -> Dev:
    """An NVIDIA 3D controller."""
    usual = {"class_code": 0x030200, "vendor": NVIDIA, "driver": "nvidia", "generation": generation}
    return Dev(bus_id=bus_id, device=device, **{**usual, **more})


def hca(
    bus_id: str, rdma: Rdma | None, *, device: int = 0x1021, generation: int = 5, net: Netdev | None = None, **more: Any
) -> Dev:
    """A ConnectX; InfiniBand unless it has an Ethernet interface."""
    ethernet = rdma is not None and rdma.link_layer == "Ethernet"
    return Dev(
        bus_id=bus_id, class_code=0x020000 if ethernet else 0x020700, vendor=MELLANOX, device=device,
        generation=generation, driver="mlx5_core", rdma=rdma, netdev=net, files={"sriov_numvfs": "0"}, **more,
    )  # fmt: skip


def answers(gpus: list[NvmlGpu], cpu: Cpu, driver: str = "550.90.07", cuda: int = 12040) -> NvmlAnswers:
    """NVML with each GPU's affinity to its node's CPUs."""
    return NvmlAnswers(gpus, {node: cpus_of(cpus) for node, cpus in cpu.nodes.items()}, driver, cuda)


def guid(number: int) -> str:
    """A node GUID in the documentation's style: none of a real card."""
    return f"a088:c203:00aa:{number:04x}"


# From rows to parts ----------------------------------------------------------------------------------------------


def _frozen(row: Mapping[str, Any]) -> Row:
    """Its lists as tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def _card(row: Row, changes: Row) -> Rdma | None:
    if changes.get("without_rdma"):
        return None
    row = {**row, "guid": guid(row["guid"]), **changes.get("ports", {}).get(row["name"], {})}
    if row.get("hw_counters") == "roce":
        row["hw_counters"] = ROCE_HW_COUNTERS
    if more := row.pop("more_counters", None):
        row["counters"] = {**IB_COUNTERS, **more}
    return Rdma(**_frozen(row))


def _device(row: Row, nets: Mapping[str, Netdev], changes: Row) -> Dev:
    """A device of a row of `pci`, with everything below it; its first word is its kind."""
    kind = next(word for word in ("gpu", "hca", "port", "switch", "function") if word in row)
    more = {word: value for word, value in row.items() if word not in (kind, "below", "rdma")}
    gone = set(changes.get("gone", ()))
    below = [
        _device(each, nets, changes) for each in row.get("below", ()) if not gone.intersection(map(str, each.values()))
    ]
    card = _card(row["rdma"], changes) if "rdma" in row else None
    for word in {"net", "netdev"} & more.keys():
        more[word] = nets[more[word]]
    place = row[kind]
    if kind in ("port", "switch"):
        return (port if kind == "port" else switch)(place, *below, **more)
    made = {
        "gpu": lambda: gpu(place, **more), "hca": lambda: hca(place, card, **more),
        "function": lambda: Dev(bus_id=place, rdma=card, **more),
    }[kind]()  # fmt: skip
    made.width_now = changes.get("lanes", {}).get(place)
    return made


def _gpus(common: Row, rows: Iterable[Row], changes: Mapping[int, Row]) -> list[NvmlGpu]:
    made = []
    for number, each in enumerate(rows):
        own = changes.get(number, {})
        row = {**common, **each, **own}
        row["answers"] = common.get("answers", {}) | each.get("answers", {}) | own.get("answers", {})
        if told := row.pop("fabric", None):
            state, *domain = told
            cluster, clique = domain or ("00" * 16, 0)
            row["answers"]["nvmlDeviceGetGpuFabricInfoV"] = fabric(state, bytes.fromhex(cluster), clique)
        made.append(NvmlGpu(**{**_frozen(row), "board": BOARDS[row["board"]]}))
    return made


def _describe(name: str) -> Callable[[Tree], Machine]:
    """The machine of one row of machines.yaml."""
    row = ROWS[name]
    changes: Row = row.get("changes", {})
    whole = ROWS[row["like"]] if "like" in row else row
    source = whole["source"] + (f" Sick: {row['sick']}" if "sick" in row else "")

    def made(tree: Tree) -> Machine:
        of_nets = changes.get("nets", {})
        all_nets = [*whole["nets"], *changes.get("more_nets", ())]
        nets = {net["name"]: Netdev(**_frozen(net | of_nets.get(net["name"], {}))) for net in all_nets}
        for root, numa, *devices in [*whole["pci"], *changes.get("more_pci", ())]:
            tree.pci(root, numa, *(_device(each, nets, changes) for each in devices))
        for net in nets.values():
            if f"/sys/class/net/{net.name}" not in tree.links:
                tree.netdev(net)
        words = _frozen({**whole["machine"], **changes.get("machine", {})})
        words["cpu"] = CPUS[words["cpu"]]
        common, *each = whole["gpus"]
        gpus = [
            one for one in _gpus(common, each, changes.get("gpus", {})) if one.bus_id not in changes.get("gone", ())
        ]
        nvml = answers(gpus, words["cpu"], *whole.get("driver", ()))
        return Machine(source=source, nvml=nvml, netdevs=(LOOPBACK, *nets.values()), **words)

    return made


MACHINES = {name: _describe(name) for name in ROWS}
BESIDE_RAILS = ("lom", "one-cable", "same-cards", "spark")  # NICs that are no rails of GPUs
# not stored in this folder
ELSEWHERE = ("demo", "four-rails", "r760xa-ipvlan", "sriov-pod", "hgx-roce", *BESIDE_RAILS, "lost-gpus", "lost-hca")


def built(describe: Callable[[Tree], Machine]) -> Host:
    """The machine as a host."""
    tree = Tree()
    machine = describe(tree)
    write_host(tree, machine)
    return cast("Host", BuiltHost(tree, machine))


def record(describe: Callable[[Tree], Machine]) -> dict[str, Json]:
    """Run the probes on the machine, and return what they were told."""
    host = built(describe)
    recorder = RecordingHost(host)
    scan(cast("Host", recorder))
    return pack_archive(recorder.answers["identity"][""], recorder.answers, cast("BuiltHost", host).machine.source)


def main(check: bool) -> int:
    """Write the recordings, or with `check` name those that differ."""
    stale = []
    files = {FOLDER / f"{name}.json": made for name, made in MACHINES.items() if name not in ELSEWHERE}
    files[FOLDER.parent.parent / "agent" / "data" / "demo.json"] = MACHINES["demo"]  # with the wheel
    for path, describe in files.items():
        content = dumps(record(describe))
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(path.name)
            if not check:
                path.write_text(content, encoding="utf-8")
    words = "stale (run python tests/machines/build.py)" if check else "written"
    print(f"{words}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
