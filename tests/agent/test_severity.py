"""Severity follows what a finding costs a job: from a tenth of a multi-node step on it is a failure."""

import re
from dataclasses import replace

from rigs.recorded import NAMES, changed, each, facts, of_code, snapshot, statuses, view, with_facts, with_ports
from rigs.tables import ROOT, each_row, rows_of

from agent.checks.findings import read_entries
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import build_view, with_environment
from contracts.finding import Status, by_loss
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts

README_CASE = "r760xa-2xA40-bf3"


def test_a_loss_of_a_tenth_is_a_failure_and_a_smaller_one_a_warning() -> None:
    """The rule that the severity of all findings about lost bandwidth follows."""
    assert [by_loss(share) for share in (0.0, 0.099, 0.1, 0.5)] == [Status.WARN] * 2 + [Status.FAIL] * 2


def test_what_the_job_sets_is_not_held_against_the_host() -> None:
    """The same host as the recommended job meets it: its interface and its GDR level cost nothing any more."""
    settings = {"NCCL_SOCKET_IFNAME": "net1", "NCCL_NET_GDR_LEVEL": "SYS"}
    seen = build_view((with_environment(snapshot(README_CASE), settings),))
    assert statuses(seen, "interfaces.choice.wrong") == {"pass"}
    assert statuses(seen, "topology.gdr.path") == {"pass"}
    assert statuses(seen, "topology.gpu_nic.far") == {"warn"}, "GPU1 is the ring's way in and out now"


@each_row(("level", "path"), rows_of(__file__)("gdr_levels"))
def test_a_gdr_level_of_the_environment_counts(level: str, path: str) -> None:
    """Polaris by its operator's own advice: NCCL_NET_GDR_LEVEL=PHB, two to three times as fast.

    The machine is built this way, so that its own nodes are healthy without; one like it of no known make fails.
    """
    polaris = with_environment(snapshot("polaris-4xA100-nv4"), {"NCCL_NET_GDR_LEVEL": level} if level else {})
    unknown = changed(polaris, HostinfoFacts, product="Server")
    assert statuses(unknown, "topology.gdr.path") == {path}
    assert statuses(polaris, "topology.gdr.path") == {path.replace("fail", "info")}


def test_a_host_interface_a_little_slower_warns_and_a_slow_one_fails_where_no_rdma_carries_the_data() -> None:
    """By the rates: 100 against 105 is a warning, 25 against 100 a failure; with an ACTIVE HCA neither costs a step."""
    plain = snapshot("cpu-only-vm")
    found = facts(InterfacesFacts, plain)
    eth0 = next(i for i in found.interfaces if i.name == found.nccl_choice)
    for slow, fast, wanted in ((12.5e9, 13.1e9, "warn"), (3.1e9, 12.5e9, "fail")):
        both = (
            replace(eth0, role="host", speed_bytes_per_second=slow),
            replace(eth0, name="eth1", role="host", speed_bytes_per_second=fast),
        )
        for host, status in ((plain, wanted), (snapshot(), "info")):
            seen = with_facts(host, interfaces=replace(found, interfaces=both))
            assert statuses(seen, "interfaces.choice.wrong") == {status}


@each_row(("ports", "wanted"), [(2, "fail"), (8, "fail"), (10, "fail"), (11, "warn"), (1, "fail")])
def test_a_port_that_is_down_costs_its_share(ports: int, wanted: str) -> None:
    """One of ten is a tenth; the only one of its kind is all that its GPU has near it."""
    rdma = facts(RdmaFacts)
    first = rdma.devices[0]
    down = replace(first, name="mlx5_99", ports=each(first.ports, state="DOWN"))
    others = [replace(first, name=f"mlx5_{n}", bus_id=None) for n in range(ports - 1)]
    another = replace(rdma.devices[4], name="mlx5_88")  # of another model, so that some port is ACTIVE
    found = changed(snapshot(), RdmaFacts, devices=(down, *others, another))
    (check,) = of_code(build_view((found,)), "rdma.port.down")
    assert check.status == wanted


@each_row(("mtu", "wanted"), [(2048, "warn"), (1024, "warn"), (512, "fail"), (256, "fail")])
def test_small_packets_cost_their_headers(mtu: int, wanted: str) -> None:
    """1024 of 4096 bytes costs 6 % of the wire, 512 12 %."""
    assert statuses(with_ports(snapshot("l40s-4x-pcie"), active_mtu_bytes=mtu), "rdma.mtu.small") == {wanted}


def test_an_iommu_that_translates_fails_where_peers_share_a_switch() -> None:
    """HGX: GPU and NIC behind one switch. On a server without switches the way led through the root complex before."""
    for name, wanted in (("hgx-h100-8xH100-8hca", {"fail"}), ("r760xa-2xA40-bf3", {"warn"})):
        translated = changed(snapshot(name), PciFacts, iommu_mode="translated")
        assert statuses(translated, "pci.iommu.translated") == wanted, name


def test_settings_that_no_environment_was_read_for_change_nothing() -> None:
    """A host whose environment is unknown keeps its checks; the job's settings still count for it."""
    unread = changed(snapshot(README_CASE), HostinfoFacts, nccl_environment=None)
    assert statuses(unread, "topology.gdr.path") == {"fail"}


@each_row(("changes", "code", "wanted"), rows_of(__file__)("slow_gpu"))
def test_what_slows_one_gpu_costs_every_rank(changes, code, wanted):
    """By its clock where that is known, by NVML's factor of two where hardware slows it."""
    first, *others = facts(GpuFacts).gpus
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    slow = changed(snapshot(), GpuFacts, gpus=(replace(first, **changes), *others))
    assert statuses(slow, code) == {wanted}


# The page ----------------------------------------------------------------------------------------------------------


def table() -> dict[str, tuple[str, str]]:
    """Code -> severity and cost, as the decision on severity states them."""
    page = (ROOT / "docs" / "decisions" / "0020-severity-by-cost.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| ([^|]+) \| (.+) \|$", page, flags=re.MULTILINE)
    return {code: (severity.strip(), cost) for code, severity, cost in rows}


def test_every_code_of_the_gate_has_its_cost_and_its_severity_on_the_page() -> None:
    """What it takes of a multi-node step, with a source or a reason; none is left out and none is invented."""
    # settings: docs/reference/nccl-environment.md
    codes = {code for code in ALL_CODES if not code.startswith("env.")}
    wrong = [f"{'add' if code in codes else 'remove'} the row of `{code}`" for code in sorted(codes ^ set(table()))]
    assert not wrong, "docs/decisions/0020-severity-by-cost.md: " + ", ".join(wrong)
    for code, (severity, cost) in table().items():
        assert set(re.findall(r"[a-z]+", severity)) <= {"fail", "warn", "info", "unknown", "or"}, code
        assert len(cost) > 15, code
        said = f"\n- **Severity:** {severity}. "
        assert said in read_entries()[code], f"{code}: docs/reference/findings.md says otherwise"


@each_row("name", NAMES)
def test_the_page_states_each_severity_that_a_machine_shows(name: str) -> None:
    """On every recorded machine."""
    stated = table()
    judged = [check for check in view(name).checks if check.status in ("fail", "warn", "info") and check.code in stated]
    assert judged or view(name).verdict.word == "pass"
    assert not [check for check in judged if check.status not in stated[check.code][0]]
