"""Each rule of the NCCL environment on the smallest host that decides it; the table of names; forms for tools.

A wrong environment is worse than none.
"""

import subprocess
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import nccl_names
import pytest
import yaml
from nccl_env_hosts import GBIT, cluster, host, interface, pci, port, settings, v2_gid
from rigs.tables import each_row, rows_of

from planner import nccl_env
from planner.advice import Recommendation
from planner.forecast import machines
from planner.nccl_env import find_plugin_of, names, nearest, newest_read, parse_version, plugin_names, replacement
from planner.nccl_env.environment import FORMATS, RenderError, render_settings
from planner.nccl_env.situation import Reason, Setting
from probes.api import Failed, Snapshot
from probes.interfaces.facts import Interface
from probes.rdma.facts import Gid, RdmaDevice


def advise(*snapshots: Snapshot, nearest: tuple[str, ...] = (), virtual: str | None = None, **more) -> Recommendation:
    """Advice for the hosts."""
    return settings(snapshots, cluster(*snapshots, nearest=nearest, virtual=virtual), **more)


def values(advice: Recommendation) -> dict[str, str]:
    """The settings by name."""
    return {setting.name: setting.value for setting in advice.settings}


def note(advice: Recommendation, topic: str) -> str:
    """All that the notes say of one topic."""
    return " ".join(note.text for note in advice.notes if note.topic == topic)


def needs(advice: Recommendation) -> set[tuple[str, str]]:
    """What a pod needs, by name and value."""
    return {(need.name, need.value) for need in advice.needs}


ETH0 = interface("eth0", "pod-default")
ROCE = {"layer": "Ethernet", "gbit": 200}
LINK_LOCAL = Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="IB/RoCE v1")
HCA, NETS = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"
FOUR = "mlx5_0,mlx5_1,mlx5_2,mlx5_3"


def rails(count: int) -> list[RdmaDevice]:
    """RoCE ports, each on its own interface."""
    return [port(f"mlx5_{i}", netdev=f"rail{i}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i in range(count)]


def counted(rows: list[dict] | None) -> list[dict] | None:
    """The members that rows stand for: of a `count` so many alike, with their numbers in their texts."""

    def filled(value, **numbers: int):
        if isinstance(value, dict):
            return {name: filled(one, **numbers) for name, one in value.items()}
        if isinstance(value, list):
            return tuple(filled(one, **numbers) for one in value)
        return value.format(**numbers) if isinstance(value, str) else value

    return rows and [
        filled({word: one for word, one in row.items() if word not in ("count", "from")},
               n=row.get("from", 0) + number, k=number, j=number + 1)
        for row in rows for number in range(row.get("count", 1))
    ]  # fmt: skip


def gid_of(row: dict) -> Gid:
    own = {"gid": v2_gid(0, row["address"]).gid, "type": "RoCE v2"} if "address" in row else {}
    return Gid(**own | {word: value for word, value in row.items() if word != "address"})


def interface_of(row: dict) -> Interface:
    rate = {"speed_bytes_per_second": row["gbit"] * GBIT} if "gbit" in row else {}
    return interface(**{word: value for word, value in row.items() if word != "gbit"}, **rate)


def host_of(row: dict) -> Snapshot:
    made = dict(row)
    if devices := counted(row.get("rdma")):
        made["rdma"] = [port(**each | {"gids": [*map(gid_of, each.get("gids", ()))]}) for each in devices]
    if links := counted(row.get("interfaces")):
        made["interfaces"] = [*map(interface_of, links)]
    if bus := row.get("bus"):
        made["bus"] = [pci(**each) for each in bus]
    return host(**made)


rows = rows_of(__file__)
TABLES = ("hcas", "virtual_functions", "interfaces", "other_fabrics", "gids", "flow_control", "crossed_rails",
          "files", "one_node")  # fmt: skip


def cases() -> Iterator[tuple]:
    """Of each row of the tables, and each release that it names, what is expected and what is advised."""
    for row in [row for table in TABLES for row in rows(table)()]:
        for version in row.get("versions", [None]):
            asked = {**row.get("ask", {}), **({"nccl_version": tuple(version)} if version else {})}
            wanted = (row.get(word, {}) for word in ("sets", "why", "says", "never"))
            yield row.get("only"), *wanted, advise(*map(host_of, row["hosts"]), **asked)


@each_row(("only", "sets", "why", "says", "never", "advice"), cases)
def test_what_is_advised(only, sets, why, says, never, advice):
    found = values(advice)
    assert {name: found.get(name) for name in sets} == sets
    transport = {name: value for name, value in found.items() if name.startswith(("NCCL_", "FI_"))}
    assert only is None or transport == only
    for name, words in why.items():
        (reason,) = [each.reason for each in advice.settings if each.name == name]
        assert words in f"{reason.rule}\n{reason.evidence}"
    for topic, words in says.items():
        said = "\n".join(f"{each.text}\n{each.evidence}" for each in advice.notes if each.topic == topic)
        assert said.startswith(words[1:]) if words[:1] == "^" else words in said if words else not said, said
    assert not [words for words in never if words in str(advice)]
    for each in (*advice.settings, *advice.needs):
        assert each.reason.rule and each.reason.evidence and each.reason.source, each


def test_needs_of_a_pod() -> None:
    """A secondary network with its device, virtual functions, EFA, RDMA of machines that nobody probed, a rack."""
    pods = {name: host_of(row) for name, row in rows("pods")().items()}
    advice = advise(pods["roce"])
    assert (values(advice)[NETS], values(advice)[HCA]) == ("net1", "mlx5_1")
    locked = {("capability", "IPC_LOCK"), ("memlock", "unlimited")}
    assert {("network", "default/rdma-net"), *locked} <= needs(advice)
    assert {name for name, _ in needs(advise(pods["roce"], multi_node=False))} == {"shm_bytes", "resource"}
    assert ("resource", "rdma/*: 8") in needs(advise(pods["virtual functions"]))
    assert {name for name, _ in locked} <= {name for name, _ in needs(advise(pods["slingshot"], multi_node=True))}
    assert ("resource", "vpc.amazonaws.com/efa: 4") in needs(advise(pods["efa"]))
    # of three of eight GPUs: the others' pods want their devices too
    assert ("resource", "vpc.amazonaws.com/efa: 2") in needs(advise(pods["efa"], ranks_per_node=3))
    for name, gpus, devices in (("p4d.24xlarge", 2, 1), ("p4d.24xlarge", 8, 4), ("p5.48xlarge", 2, 8)):
        advice = settings([], machines.cluster(name, 2, gpus_per_node=gpus))
        assert ("resource", f"vpc.amazonaws.com/efa: {devices}") in needs(advice), (name, gpus)
    for name in ("dgx-h100", "gb200-nvl72", "BM.GPU.H100.8", "a3-ultragpu-8g", "p5.48xlarge"):
        assert locked <= needs(settings([], machines.cluster(name, 2))), name
    assert not locked & needs(settings([], machines.cluster("g5.12xlarge", 2)))
    domain = ("compute_domain", "resource.nvidia.com/v1beta1")
    for name, nodes, joined in (("gb200-nvl72", 2, True), ("dgx-b200", 2, False), ("gb200-nvl72", 1, False)):
        advice = settings([], machines.cluster(name, nodes), multi_node=nodes > 1)
        assert (domain in needs(advice)) is joined, name
        assert ("ComputeDomain" in note(advice, "NCCL_MNNVL_ENABLE")) is joined, name


def test_host_without_gpus_gets_gloo() -> None:
    """gloo takes the address of the host name otherwise; NCCL is not mentioned."""
    loopback = interface("lo", "loopback", "127.0.0.1/8")
    advice = advise(host(gpus=0, rdma=None, interfaces=[loopback, interface("eth0", "host")]))
    assert advice.backend == "gloo"
    assert values(advice) == {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "32"}
    assert not [each for each in advice.notes if each.topic.startswith("NCCL")]
    assert "GLOO_SOCKET_IFNAME" not in values(advise(host(gpus=0, rdma=None, interfaces=[loopback])))


@each_row(
    ("class_code", "vendor", "library"),
    [(0x120000, 0x1002, "RCCL"), (0x038000, 0x1002, "RCCL"), (0x120000, 0x1DA3, "HCCL")],
)
def test_gpus_of_amd_and_gaudi_are_seen_and_not_judged(class_code: int, vendor: int, library: str) -> None:
    """No gloo, no threads for ranks on the CPU: the host has accelerators, which are not NVIDIA's."""
    gpus = [pci(f"0000:{i + 1:02x}:00.0", class_code, vendor, driver="amdgpu") for i in range(8)]
    advice = advise(host(gpus=0, rdma=[port(f"mlx5_{i}", **ROCE) for i in range(8)], bus=gpus,
                         interfaces=[interface("eth0", "host")]))  # fmt: skip
    assert (advice.backend, advice.settings) == (library.lower(), ())
    assert f"{library} is not supported yet" in note(advice, "RCCL")
    assert "CPU" not in str(advice.notes)


def test_the_cpus_own_amd_display_beside_nvidia_gpus_is_none_to_judge() -> None:
    """A workstation's integrated graphics are class 03 00 of AMD's vendor id."""
    bus = [pci("0000:01:00.0", 0x030000, 0x10DE, driver="nvidia"),
           pci("0000:0a:00.0", 0x030000, 0x1002, driver="amdgpu")]  # fmt: skip
    assert advise(host(gpus=1, bus=bus)).backend == "nccl"
    server = [pci("0000:03:00.0", 0x030000, 0x1A03, driver="ast")]
    assert advise(host(gpus=0, bus=server, interfaces=[interface("eth0", "host")])).backend == "gloo"


def test_only_system_configuration_names_are_advised() -> None:
    """Of a host that has everything: no variable of NCCL's Debugging section."""
    everything = host(
        rdma=[port(f"mlx5_{i}", gids=[LINK_LOCAL], netdev=f"rail{i}", traffic_class=106, **ROCE) for i in range(2)]
        + [port("rdmap0", kind="efa")],
        interfaces=[ETH0, *(interface(f"rail{i}", "secondary", f"10.1.{i}.1/24") for i in range(2))],
    )
    advised: set[str] = set()
    for version in ((2, 18, 3), (2, 27, 7)):
        advised |= set(values(advise(everything, multi_node=True, nccl_version=version)))
    nccl = {name for name in advised if name.startswith("NCCL_")}
    assert len(nccl) >= 5
    assert {names()[name].doc_class for name in nccl} == {"system"}


def test_twin_that_a_file_system_is_mounted_through_is_left_out() -> None:
    """A server's address in its subnet, and every GPU keeps a port as near."""
    twin, near = port("mlx5_4", netdev="stor0", gids=[v2_gid(3, "10.200.0.5")], **ROCE), tuple(FOUR.split(","))
    links = [interface(f"rail{i}", "host", f"10.1.{i}.5/24") for i in range(4)]
    links += [interface("stor0", "host", "10.200.0.5/16")]
    mounted = host(gpus=4, rdma=[*rails(4), twin], interfaces=links, storage_servers=("10.200.7.9",))
    crowded = cluster(mounted, nearest=near, crowded={3: ("mlx5_3", "mlx5_4")})
    assert values(settings([mounted], crowded))[HCA] == FOUR
    # the rail carries storage too
    only = host(gpus=4, rdma=rails(4), interfaces=links, storage_servers=("10.1.2.200",))
    assert HCA not in values(settings([only], cluster(only, nearest=near)))


def test_one_host_planned_several_times_over() -> None:
    """What-if: the same snapshot under made-up names counts as several nodes."""
    pod = host("a", rdma=[port("rdmap0", kind="efa")], interfaces=[interface("ens5", "host")])
    assert values(settings([pod], cluster(host("a-0"), host("a-1"))))["NCCL_NET"] == "AWS Libfabric"


def test_probe_that_failed_is_unknown_not_absent() -> None:
    """A hung driver does not make a GPU host a CPU host, nor a broken sysfs a host without RDMA."""
    broken = host(rdma=None)
    broken.outcomes.update(gpu=Failed(error="no answer for 10 s"), rdma=Failed(error="no answer for 10 s"))
    advice = advise(broken)
    assert (advice.backend, advice.settings) == ("nccl", ())
    assert note(advice, "GPU").startswith("Unknown")
    assert note(advice, HCA).startswith("Unknown")


@each_row(("gpus", "quota", "ranks", "threads"), rows("threads"))
def test_threads_of_a_rank(gpus: int, quota: float | None, ranks: int | None, threads: str | None) -> None:
    """torchrun sets OMP_NUM_THREADS for several ranks of a node only: alone, one takes every core that it sees."""
    advice = advise(host(gpus=gpus, cgroup_cpus=quota, interfaces=None), ranks_per_node=ranks)
    assert values(advice).get("OMP_NUM_THREADS") == threads


def test_the_environment_is_of_the_network_that_the_forecast_is_of() -> None:
    """TCP on machines with RDMA keeps NCCL on sockets; RDMA on machines without a known device is no TCP."""
    for name in ("p5.48xlarge", "dgx-h100"):
        own = settings((), machines.cluster(name, 2), multi_node=True)
        tcp = settings((), machines.over_network(machines.cluster(name, 2), "10G", "tcp"), multi_node=True)
        assert values(tcp)["NCCL_NET"] == "Socket"
        assert not [need for need in tcp.needs if "efa" in need.value or need.name in ("memlock", "capability")]
        assert [need for need in own.needs if need.name == "memlock"]
    found = settings((), machines.over_network(machines.cluster("p3.16xlarge", 2), "100G", "rdma"), multi_node=True)
    assert "NCCL_NET" not in values(found)
    assert note(found, "NCCL_NET").startswith("Unknown")


REASON = Reason(rule="because", evidence="seen", source="read")


def setting(name: str, value: str) -> Setting:
    """A setting with some reason."""
    return Setting(name=name, value=value, reason=REASON)


AWKWARD = [setting("NCCL_NET", "AWS Libfabric"), setting("NCCL_IB_TC", "106"), setting("NCCL_IB_HCA", "=mlx5_1,mlx5_2")]


def test_table_is_whole() -> None:
    """Every row is read, the well-known names are there, and release ranges make sense."""
    table = names()
    assert len(table) > 310
    assert {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_CROSS_NIC", "NCCL_ALGO"} <= set(table)
    for entry in table.values():
        assert entry.first is None or entry.last is None or entry.first <= entry.last, entry
        assert entry.first is None or entry.first <= newest_read(), entry
        assert (entry.status == "removed") == (entry.last is not None), entry
        assert entry.kind in ("integer", "text", ""), entry
        assert (entry.status == "other") == (entry.doc_class == ""), entry


def test_replacements_exist_and_each_plugin_says_who_reads_its_names() -> None:
    """What is named instead of a removed name NCCL reads; no name of libnccl itself is given to a plugin."""
    replaced = {entry.name: replacement(entry.name) for entry in names().values()}
    assert all(names()[old].status == "removed" and names()[new].status == "current"
               for old, new in replaced.items() if new is not None)  # fmt: skip
    plugins = {each.plugin for each in plugin_names()}
    assert plugins >= {"aws-ofi-nccl", "GPUDirect-TCPX", "GPUDirect-TCPXO", "gIB", "SHARP", "UCX", "RCCL", "Spectrum-X",
                       "Inspector", "profiler"}  # fmt: skip
    assert all(each.reader and each.source for each in plugin_names())
    assert [name for name, entry in names().items() if entry.status == "current" and find_plugin_of(name)] == []


@each_row(("name", "plugin"), rows("plugins"))
def test_plugin_of(name: str, plugin: str) -> None:
    """Names of plugins come first."""
    found = find_plugin_of(name)
    assert found is not None and found.plugin == plugin


def test_releases_are_as_their_libraries_read_them() -> None:
    """What 2.31 and 2.32 brought, and what they read no more (bench/nccl_names.py)."""
    table = names()
    assert newest_read() >= (2, 32, 3)
    assert table["NCCL_RUN_DIAGNOSTICS"].first == (2, 31, 2)
    assert table["NCCL_IB_PKEY_VALUE"].first == (2, 31, 2)
    assert (table["NCCL_IB_RAIL_POLICY"].first, table["NCCL_IB_RAIL_POLICY"].kind) == ((2, 32, 3), "text")
    assert (table["NCCL_DIAGNOSTICS_ECC_THRESHOLD"].kind, table["NCCL_RUN_DIAGNOSTICS"].default) == ("integer", "0")
    assert table["NCCL_MLOPART_RDMA_ENABLE"].last == (2, 31, 2)


@each_row(("wrong", "right"), rows("meant"))
def test_the_name_that_was_meant_comes_first(wrong: str, right: str | None) -> None:
    assert next(iter(nearest(wrong)), None) == right


def test_parse_version() -> None:
    """As NCCL, its tags and rebuilt wheels print it; the message carries a text that is none, and 2.99.1 is newer."""
    texts = {"2.21.5+cuda12.4": (2, 21, 5), "2.27.7": (2, 27, 7), "v2.30.7-1": (2, 30, 7), "2.21": (2, 21, 0),
             "2.26.2.post1": (2, 26, 2)}  # fmt: skip
    assert {text: parse_version(text) for text in texts} == texts
    with pytest.raises(ValueError, match="banana"):
        parse_version("banana")
    assert parse_version("2.99.1") > newest_read()


def test_each_format_is_what_its_reader_takes() -> None:
    """Docker hands on all that follows the first '='; the API server refuses a number as the value of an EnvVar."""
    lines = render_settings(AWKWARD, "env").splitlines()
    pairs = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert pairs == {"NCCL_NET": "AWS Libfabric", "NCCL_IB_TC": "106", "NCCL_IB_HCA": "=mlx5_1,mlx5_2"}
    read = yaml.safe_load(render_settings(AWKWARD, "k8s"))
    assert read == [{"name": each.name, "value": each.value} for each in AWKWARD]
    assert all(isinstance(entry["value"], str) for entry in read)
    assert all(render_settings([], form).startswith("#") for form in ("env", "shell"))
    assert yaml.safe_load(render_settings([], "k8s")) == []


def test_what_no_format_can_carry_is_refused() -> None:
    """A line break would smuggle in a second setting."""
    for form in FORMATS:
        with pytest.raises(RenderError, match="NCCL_NET"):
            render_settings([setting("NCCL_NET", "a\nB=c")], form)


# NCCL's minor releases came every 2 to 4 months from 2.18 (April 2023) to 2.32 (September 2026): a table of half a year
# lacks one or two.
OLDEST_DAYS = 183


@pytest.mark.long
def test_no_newer_release_is_out_than_the_table_knows() -> None:
    """Asked of pip's index where it answers, else the table's own date decides; `bench/nccl_names.py` fixes it."""
    try:
        found = [each for package in nccl_names.PACKAGES for each in nccl_names.releases_on_index(package)]
        published = [parse_version(each) for each in found]
    except (OSError, subprocess.SubprocessError):
        published = []
    if published:
        assert max(published) <= newest_read(), "python bench/nccl_names.py read, then table"
    else:
        table = Path(nccl_env.__file__).with_name("data") / "nccl_env_names.tsv"
        stamp = table.read_text(encoding="utf-8").partition("\n# read on: ")[2][:10]
        age = (datetime.now(UTC).date() - date.fromisoformat(stamp)).days
        assert age <= OLDEST_DAYS, f"the table is {age} days old, and no index tells whether a release is out"
