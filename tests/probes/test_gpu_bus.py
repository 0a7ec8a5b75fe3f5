"""GPUs that the bus has and NVML leaves out: a fault, or none of this process's."""

from __future__ import annotations

from typing import Any

from rigs.tables import each_row

from contracts.finding import Status
from probes.gpu.compare import check_bus
from probes.gpu.facts import BusGpu, GpuBus

EIGHT = tuple(f"0000:{n}:00.0" for n in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))


def bus(
    *, nodes: dict[int, bool] | None = None, proc: bool | set[int] = True, driver: str = "nvidia", **more: Any
) -> GpuBus:
    """Eight GPUs; `nodes` says which /dev/nvidiaN are there and may be opened, `proc` which minors the driver tells."""
    nodes = dict.fromkeys(range(8), True) if nodes is None else nodes
    told = set(range(8)) if proc is True else set() if proc is False else proc
    return GpuBus(
        gpus=tuple(
            BusGpu(
                bus_id=address, driver=driver, minor=n if n in told else None,
                node_exists=n in nodes if n in told else None, node_usable=nodes.get(n) if n in told else None,
            )
            for n, address in enumerate(EIGHT)
        ),
        nodes=sum(nodes.values()), **more,
    )  # fmt: skip


POD = {"container": "kubernetes"}
TWO, SEVEN = {0: True, 1: True}, dict.fromkeys(range(7), True)
MISSING, NOT_GIVEN = "gpu.device.missing", "gpu.device.not_given"
CASES: list[tuple[str, GpuBus, int, str, Status | None]] = [
    # where, bus, GPUs that NVML lists, code, severity
    ("a whole host", bus(), 8, "", None),
    ("a host, one short", bus(), 7, MISSING, Status.FAIL),
    ("a host, all gone", bus(), 0, MISSING, Status.FAIL),
    ("a host, one short and no node of it", bus(nodes=SEVEN), 7, MISSING, Status.FAIL),
    ("a host without the driver's /proc", bus(proc=False), 7, MISSING, Status.FAIL),
    ("a Slurm job that may open two", bus(nodes={n: n < 2 for n in range(8)}), 2, NOT_GIVEN, Status.INFO),
    ("a pod that was given two (device list)", bus(nodes=TWO, **POD), 2, NOT_GIVEN, Status.INFO),
    ("a pod given two (toolkit)", bus(nodes=TWO, proc={0, 1}, requested=2, **POD), 2, NOT_GIVEN, Status.INFO),
    ("the same without the variable", bus(nodes=TWO, proc={0, 1}, **POD), 2, NOT_GIVEN, Status.INFO),
    ("a pod that was given two and sees one", bus(nodes=TWO, **POD), 1, MISSING, Status.FAIL),
    ("the same by its variable", bus(nodes={0: True}, proc={0}, requested=2, **POD), 1, MISSING, Status.FAIL),
    ("a privileged pod, one short", bus(**POD), 7, MISSING, Status.FAIL),
    ("a pod without a GPU", bus(nodes={}, **POD), 0, NOT_GIVEN, Status.UNKNOWN),
    ("an agent's pod that asked for all, one without a node", bus(nodes=SEVEN, all_requested=True, **POD),
     7, NOT_GIVEN, Status.UNKNOWN),
    ("GPUs without a driver", bus(driver="nouveau"), 0, "", None),
]  # fmt: skip


@each_row(("where", "found", "count", "code", "severity"), CASES, ids=[case[0] for case in CASES])
def test_a_gpu_that_nvml_leaves_out(where: str, found: GpuBus, count: int, code: str, severity: Status | None) -> None:
    """A missing one fails and is named; one that was given to others is told; none read is never fine."""
    findings = list(check_bus(found, set(EIGHT[:count]), count))
    worst = [(f.code, f.status) for f in findings if f.code == code]
    assert worst == ([(code, severity)] if code else []), (where, findings)
    if severity is Status.FAIL:
        told = next(f for f in findings if f.code == code)
        assert EIGHT[count] in told.message and EIGHT[count] in told.subject
        assert "gpu.device.not_given" not in {f.code for f in findings} or "given two" in where or "variable" in where


def test_lost_gpus_without_an_address_are_not_told_twice() -> None:
    """NVML still counts a lost GPU but may not say where it is: then it stands for one that is not listed."""
    assert not list(check_bus(bus(), set(EIGHT[:7]), 8))
    two = list(check_bus(bus(), set(EIGHT[:6]), 7))
    assert [f.code for f in two] == ["gpu.device.missing"]
    assert "1 of 0000:d1:00.0, 0000:df:00.0" in two[0].message


def test_a_bus_that_could_not_be_read_says_nothing() -> None:
    """Without sysfs there is nothing to compare with."""
    assert not list(check_bus(None, set(), 0))
