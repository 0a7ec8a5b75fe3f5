# ruff: noqa: E501 - messages are quoted as they are printed
"""Every fault that a log can show has a code, its lines and a first action."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from rigs.tables import each_row

from collectives.nccl_log import evidence, other_texts
from collectives.nccl_log import lines as evidence_lines
from collectives.nccl_log import problems as evidence_problems
from collectives.nccl_log.codes import CODES, SIGNS

HEAD = "node-1:100:120 [0] "
WARN = f"{HEAD}transport/net_ib.cc:1 NCCL WARN "
INFO = f"{HEAD}NCCL INFO "
NEW_WARN = "[2026-01-02 03:04:05] node-1:100:120 [0] transport/net_ib/p2p.cc:688 (ncclIbLogCompletion) NCCL WARN "


def codes(*lines: str, **options: list[str]) -> list[str]:
    return sorted(problem.code for problem in evidence.read(list(lines), **options).problems)


WARNINGS = [
    (WARN + "NET/IB : Got completion with error 12, opcode 1, len 32478, vendor err 129", ["ib_retry_exceeded"]),
    (WARN + "NET/IB : Got completion from peer 10.0.0.2<33> with error 12, opcode 0, len 0, vendor err 129 (Recv)", ["ib_retry_exceeded"]),
    (WARN + "NET/IB: Got completion from peer 10.0.0.2<33> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fe80::1 remoteGids fe80::2 hca mlx5_0", ["ib_retry_exceeded"]),
    (NEW_WARN + "NET/IB: Got completion from peer 10.0.0.2<33> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129 (Recv) hca mlx5_0", ["ib_retry_exceeded"]),
    (NEW_WARN + "NET/IB: Got completion from peer 10.0.0.2<33> with status=IBV_WC_RNR_RETRY_EXC_ERR(13) opcode=x(0) vendor_err=135", ["ib_rnr_retry_exceeded"]),
    (NEW_WARN + "NET/IB: Got completion from peer 10.0.0.2<33> with status=IBV_WC_LOC_PROT_ERR(4) opcode=x(0) vendor_err=81", ["ib_local_protection_error"]),
    (WARN + "NET/IB : Got completion with error 4, opcode 129, len 0, vendor err 81", ["ib_local_protection_error"]),
    (WARN + "NET/IB : Got completion with error 5, opcode 0, len 0, vendor err 249", ["ib_flush_error"]),
    (WARN + "NET/IB : Got completion from peer 10.0.0.2<33> with error 10, opcode 0, len 0, vendor err 136", ["ib_remote_access_error"]),
    (WARN + "NET/IB : Got completion with error 9, opcode 0, len 0, vendor err 1", ["ib_completion_error"]),
    (WARN + "Call to ibv_reg_mr failed with error Cannot allocate memory", ["ib_reg_mr_failed", "memlock_too_small"]),
    (WARN + "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory errno 12", ["ib_reg_mr_failed", "memlock_too_small"]),
    (WARN + "Call to ibv_reg_mr failed with error Bad address", ["ib_reg_mr_failed"]),
    (WARN + "Call to ibv_create_qp failed", ["ib_create_qp_failed"]),
    (WARN + "Call to ibv_create_qp failed with error Unknown error -12", ["ib_create_qp_failed", "memlock_too_small"]),
    (WARN + "Call to ibv_create_cq failed with error Cannot allocate memory", ["ib_create_qp_failed", "memlock_too_small"]),
    (WARN + "Call to ibv_modify_qp failed with error Invalid argument", ["gid_index_invalid", "ib_modify_qp_failed"]),
    (WARN + "Call to ibv_modify_qp failed with error No data available errno 61", ["gid_index_invalid", "ib_modify_qp_failed"]),
    (WARN + "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 3", ["ib_modify_qp_failed"]),
    (WARN + "Call to ibv_modify_qp failed with error No such device", ["ib_modify_qp_failed"]),
    (WARN + "NET/IB : mlx5_3:1 Got non-fatal async event: port error(10)", ["ib_port_error"]),
    (WARN + "NET/IB : Got async event : port error", ["ib_port_error"]),
    (WARN + "NET/IB : Got async event : client reregistration", ["ib_async_event"]),
    (WARN + "NET/IB : mlx5_0:1 GID table changed", ["ib_async_event"]),
    (WARN + "Call to ibv_open_device failed", ["ibv_open_device_failed"]),
    (INFO + "Failed to open libibverbs.so[.1]", ["libibverbs_missing"]),
    (INFO + "Count not open libibverbs.so", ["libibverbs_missing"]),
    (WARN + "Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes", ["shm_too_small"]),
    (WARN + "Error: failed to extend /dev/shm/nccl-x to 33030532 bytes, error: No space left on device (28)", ["shm_too_small"]),
    (WARN + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", ["duplicate_gpu"]),
    (NEW_WARN + "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable", ["duplicate_gpu"]),
    ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", ["duplicate_gpu"]),
    (WARN + "Mismatched NCCL version detected : rank 0 version 22304 rank 1 version 22105", ["nccl_version_mismatch"]),
    (WARN + "Message truncated : received 1024 bytes instead of 256", ["nccl_version_mismatch"]),
    (WARN + "Bootstrap : no socket interface found", ["bootstrap_no_interface"]),
    (WARN + "NET/Socket : No usable listening interface found", ["bootstrap_no_interface"]),
    (WARN + "Net : No interface found in the same subnet as remote address 10.0.0.1<5>", ["no_interface_in_subnet"]),
    (WARN + "P2P is disabled between NVLINK connected GPUs 1 and 0. This should not be the case", ["p2p_disabled_nvlink"]),
    (WARN + "Error: network AWS Libfabric not found.", ["network_not_found"]),
    (WARN + "Failed to initialize any NET plugin", ["net_plugin_failed"]),
    (WARN + "NET/OFI OFI fi_getinfo() call failed: No data available", ["no_efa_provider"]),
    (INFO + "NET/OFI No eligible providers were found", ["no_efa_provider"]),
    (WARN + "NET/OFI aws-ofi-nccl initialization failed", ["efa_plugin_init_failed"]),
    (HEAD + "get_ofi_provider:312 NCCL WARN NET/OFI Could not find any optimal provider", ["no_efa_provider"]),
    (HEAD + "create_nccl_ofi_component:459 NCCL WARN NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument", ["efa_endpoint_failed"]),
    (HEAD + "nccl_net_ofi_domain_get_ep:969 NCCL WARN NET/OFI Creating new endpoint for domain 0x7f9b failed: Invalid argument", ["efa_endpoint_failed"]),
    (HEAD + "register_mr_buffers:586 NCCL WARN NET/OFI Unable to register memory (type = 2) for device 2. RC: -22, Error: Invalid argument", ["efa_memory_not_registered"]),
    (WARN + "MNNVL (cliqueSize 8) is available but not working on this system. Check the IMEX", ["mnnvl_not_working"]),
    (WARN + "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", ["nvls_bind_failed"]),
    (WARN + "No transport found for rank 0[1b000] -> rank 1[1c000]", ["no_transport_found"]),
    (WARN + "Call to connect to 10.0.0.2<45> failed : No route to host", ["socket_connect_failed"]),
    (WARN + "socketPollConnect: connect to 10.0.0.2<4> returned Connection refused (111)", ["socket_connect_failed"]),
    (WARN + "NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_1:1/RoCE. Try selecting NICs of only one link type", ["mixed_link_layers"]),
    (WARN + "Cuda failure 'out of memory'", ["cuda_failure"]),
    (WARN + "Detected mixed local Net device counts across ranks (min 7, max 8).", ["net_device_count_mismatch", "no_transport_evidence"]),
    (WARN + "Could not open XML topology file /opt/topo.xml : No such file or directory", ["no_transport_evidence", "topo_file_missing"]),
    ("[rank3]:[E ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(", ["watchdog_timeout"]),
    (INFO + "Invalid value yes for NCCL_IB_DISABLE, using default 0.", ["invalid_env_value", "no_transport_evidence"]),
    (WARN + 'Missing "iommu=pt" from kernel command line', ["iommu_not_passthrough", "no_transport_evidence"]),
    (
        WARN + 'Missing "HSA_FORCE_FINE_GRAIN_PCIE=1" from environment which can lead to low RCCL performance',
        ["fine_grained_memory_off", "no_transport_evidence"],
    ),
    (
        WARN + "0x7f:0x7e, nic 1, eth2, 10.0.0.1<->10.0.0.2 rx ctrl timeout cnt 81, nanos 10000012345",
        ["no_transport_evidence", "tcpx_timeout"],
    ),
    (WARN + "NUMA auto balancing enabled which can lead to variability in the RCCL performance!", ["no_transport_evidence", "numa_balancing_enabled"]),
]  # fmt: skip


@each_row(("line", "expected"), WARNINGS, ids=lambda value: value[-60:] if isinstance(value, str) else "")
def test_warnings(line: str, expected: list[str]) -> None:
    """The text of each version, its code, and the line as proof."""
    verdict = evidence.read(["loss 1.0", line])
    got = sorted(problem.code for problem in verdict.problems)
    assert [code for code in got if code not in ("no_transport_evidence",)] == [
        code for code in expected if code != "no_transport_evidence"
    ]
    shown = [row for problem in verdict.problems for row in problem.lines]
    assert {row.line for row in shown} == {2}
    worst = {problem.severity for problem in verdict.problems}
    assert evidence.exit_code(verdict) == (evidence.FAILED if "fail" in worst else evidence.NO_EVIDENCE)


IB = f"{INFO}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
TWO_NODES = f"{INFO}comm 0x1 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0"
EFA = f"{INFO}NET/OFI Selected provider is efa, fabric is efa (found 4 nics)"
ONE_NODE = f"{INFO}comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0"
P2P = f"{INFO}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
SHM = f"{INFO}Channel 00 : 1[1] -> 0[0] via SHM/direct/direct"


def net(name: str = "IB/0", tag: str = "/GDRDMA", direction: str = "send") -> str:
    return f"{INFO}Channel 00/0 : 0[0] -> 2[0] [{direction}] via NET/{name}{tag}"


SCENES = {
    "healthy": ([IB, TWO_NODES, net(), net(direction="receive"), P2P], "on", [], 0),
    "efa healthy": ([TWO_NODES, net("Libfabric/0"), net("Libfabric/0", direction="receive"), P2P], "on", [], 0),
    "no receive seen": ([TWO_NODES, net(), P2P], "on", ["one_direction_seen"], 5),
    "no send seen": ([net(direction="receive"), P2P], "on", ["one_direction_seen"], 5),
    "sends over sockets": ([net("Socket/0", ""), net(direction="receive")], "partial", ["mixed_networks"], 3),
    "libfabric off": ([net("AWS Libfabric/0", "")], "off", ["net_without_gdrdma"], 3),
    "efa off": ([EFA, net("AWS Libfabric/0", "")], "off", ["efa_without_gdrdma"], 3),
    "gib off": ([net("gIB/0", "")], "off", ["ib_without_gdrdma"], 3),
    "fastsocket": ([net("FastSocket/0", "")], "off", ["socket_fallback"], 3),
    "ib off": ([IB, net(tag="")], "off", ["ib_without_gdrdma"], 3),
    "peermem, old": (
        [f"{INFO}NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)", net(tag="")],
        "off",
        ["ib_without_gdrdma", "peermem_missing"],
        3,
    ),
    "peermem, no channel lines": (
        [IB, f"{INFO}Using network IB", f"{INFO}NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"],
        "off",
        ["peermem_missing"],
        3,
    ),
    "too far": (
        [IB, f"{INFO}GPU Direct RDMA Disabled for GPU 1b000 / HCA 0 (distance 8 > 4), read 1", net(tag="")],
        "off",
        ["gdr_distance_too_far", "ib_without_gdrdma"],
        3,
    ),
    "level LOC": (
        [f"{INFO}NCCL_NET_GDR_LEVEL set by environment to LOC", net(tag="")],
        "off",
        ["gdr_disabled_by_env", "ib_without_gdrdma"],
        3,
    ),
    "one rail without": (
        [net(), net(direction="receive"), net("IB/1", ""), net("IB/1", "", "receive")],
        "partial",
        ["gdr_partial"],
        3,
    ),
    "before Ampere": ([net(tag=""), net(direction="receive")], "partial", ["gdr_read_disabled_pre_ampere"], 0),
    "Ampere reads too": ([net(tag=""), net(direction="receive"), P2P + "/read"], "partial", ["gdr_partial"], 3),
    "AMD": (["RCCL version : 2.22.3", net(tag=""), net(direction="receive")], "partial", ["gdr_partial"], 3),
    "one node, a storage NIC beside": (
        [f"{INFO}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:1<0>", ONE_NODE, P2P],
        "none",
        [],
        0,
    ),
    "read off by hand": (
        [f"{INFO}NCCL_NET_GDR_READ set by environment to 0.", net(tag=""), net(direction="receive")],
        "partial",
        ["gdr_read_disabled_by_env"],
        0,
    ),
    "selected socket": ([f"{INFO}Using network Socket"], "none", ["no_transport_evidence", "socket_fallback"], 5),
    "selected socket, two nodes": (
        [f"{INFO}Using network Socket", f"{INFO}comm 0x5 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0"],
        "off",
        ["socket_fallback"],
        3,
    ),
    "P2P refused": (
        [f"{INFO}Could not enable P2P between dev 2(=300000) and dev 1(=200000)"],
        "none",
        ["no_transport_evidence", "p2p_disabled_by_driver"],
        5,
    ),
    "only a warning that nobody knows": (
        ["node-1:10:20 [0] tcpxComm.cc:12 NCCL WARN rx ctrl timeout"],
        "none",
        ["no_transport_evidence", "other_warnings"],
        5,
    ),
    "libibverbs, perhaps one node": (
        [f"{INFO}Failed to open libibverbs.so[.1]", f"{INFO}Using network Socket"],
        "none",
        ["libibverbs_missing", "no_transport_evidence", "socket_fallback"],
        5,
    ),
    "plugin refused by its device": (
        [EFA, f"{INFO}NET/Libfabric : GPU Direct RDMA Disabled for HCA 0 'rdmap0s29'"],
        "none",
        ["gdr_refused_by_plugin"],
        3,
    ),
    "CUDA's error while the test ended well": (
        [
            f"{INFO}Using network IB",
            "node-1:1:1 [0] transport/nvls.cc:130 NCCL WARN Cuda failure 1 'invalid argument'",
            P2P,
            "# Avg bus bandwidth    : 301.2",
        ],
        "none",
        [],
        0,
    ),
    "plugin without GDR": (
        [f"{INFO}NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR"],
        "none",
        ["gdr_refused_by_plugin"],
        3,
    ),
    "selected IB": ([IB, f"{INFO}Using network IB"], "none", ["no_transport_evidence"], 5),
    "GDR 1": ([f"{INFO}Connected all rings, use ring PXN 0 GDR 1"], "none", ["no_transport_evidence"], 5),
    "enabled is no proof": (
        [IB, f"{INFO}GPU Direct RDMA Enabled for GPU 7 / HCA 0 (distance 4 <= 4), read 0 mode Default"],
        "none",
        ["no_transport_evidence"],
        5,
    ),
    "one node, socket loaded": (
        [ONE_NODE, f"{INFO}NET/IB : No device found.", f"{INFO}Using network Socket", P2P],
        "none",
        [],
        0,
    ),
    "one node, no channels yet": ([ONE_NODE, f"{INFO}Using network Socket"], "none", ["no_transport_evidence"], 5),
    "two nodes, only P2P": ([TWO_NODES, f"{INFO}Using network IB", P2P], "none", ["no_inter_node_evidence"], 5),
    "empty list is no device": (
        [f"{INFO}NET/IB : No device found.", f"{INFO}NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>", net("Socket/0", "")],
        "off",
        ["no_ib_device", "socket_fallback"],
        3,
    ),
    "IB disabled": (
        [f"{INFO}NCCL_IB_DISABLE set by environment to 1.", net("Socket/0", "")],
        "off",
        ["ib_disabled_by_env", "socket_fallback"],
        3,
    ),
    "docker0": (
        [f"{INFO}NET/Socket : Using [0]docker0:172.17.0.1<0>", f"{INFO}Using network Socket"],
        "none",
        ["docker_interface_used", "no_transport_evidence", "socket_fallback"],
        5,
    ),
    "ranks differ": (
        [f"{INFO}Using network IB", f"{INFO}Using network Socket", net(), net("Socket/0", "")],
        "partial",
        ["mixed_networks"],
        3,
    ),
    "P2P off by hand": ([f"{INFO}NCCL_P2P_DISABLE set by environment to 1", SHM], "none", ["p2p_disabled_by_env"], 0),
    "pairs": ([P2P, SHM], "none", ["shm_across_pairs"], 0),
    "level": ([f"{INFO}NCCL_P2P_LEVEL set by environment to PIX", P2P, SHM], "none", ["p2p_level_limited_by_env"], 0),
    "odd level": ([f"{INFO}NCCL_P2P_LEVEL set by environment to phb", P2P], "none", ["unknown_level_value"], 0),
    "network within a node": ([ONE_NODE, net()], "on", ["net_within_node"], 0),
    "shutdown": ([P2P, f"{WARN}[Service thread] Accept failed Success"], "none", ["benign_teardown_warnings"], 0),
    "follow-on": (
        [
            f"{WARN}NET/IB : Got completion with error 12, opcode 0",
            f"{WARN}NET/IB : Got completion with error 5, opcode 0",
        ],
        "none",
        ["ib_retry_exceeded"],
        3,
    ),
    "rails of one kind in use": (
        [f"{INFO}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:1<0>", net(), net(direction="receive")],
        "on",
        [],
        0,
    ),
    "both kinds in use": (
        [
            f"{INFO}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:1<0>",
            net(),
            net("IB/1", direction="receive"),
        ],
        "on",
        ["mixed_link_layers"],
        0,
    ),
    "nothing": (["epoch 1", "epoch 2"], "none", ["no_transport_evidence"], 5),
    "empty": ([], "none", ["no_transport_evidence"], 5),
}


@each_row("name", SCENES)
def test_scenes(name: str) -> None:
    """The whole verdict: GPUDirect RDMA, problems, and what a gate does with it."""
    lines, gdrdma, expected, exit_code = SCENES[name]
    verdict = evidence.read(lines)
    assert verdict.gdrdma == gdrdma
    assert sorted(problem.code for problem in verdict.problems) == expected
    assert evidence.exit_code(verdict) == exit_code


def test_a_failed_verb_shows_the_transport() -> None:
    """An excerpt with nothing but the error of a queue pair still says InfiniBand."""
    assert (
        evidence.read([WARN + "Call to ibv_modify_qp failed with error Invalid argument"]).inter_node_transport == "IB"
    )
    assert evidence.read([WARN + "Call to ibv_open_device failed"]).inter_node_transport == "unknown"


def test_dead_port_by_absence() -> None:
    """NCCL lists active ports only: what is missing must be named by comparison."""
    lines = [IB, net(), net(direction="receive")]
    verdict = evidence.read(lines, ports=["mlx5_0:1", "mlx5_1", "mlx5_2:1"])
    (problem,) = verdict.problems
    assert (problem.code, problem.count) == ("dead_port", 1)
    assert "node-1: mlx5_2:1" in problem.message
    assert evidence.exit_code(verdict) == evidence.PASS
    assert evidence.exit_code(verdict, fail_on="warn") == evidence.WARNED


def test_a_host_that_lists_fewer_ports_than_its_peers() -> None:
    """Without a list, hosts are compared with each other."""
    other = IB.replace("node-1", "node-2").replace(" [1]mlx5_1:1/IB", "")
    (problem,) = evidence.read([IB, other, net(), net(direction="receive")]).problems
    assert (problem.code, problem.message.endswith("node-2: mlx5_1:1")) == ("dead_port", True)


@each_row(
    ("listing", "ports"),
    [
        ("[0]mlx5_0+mlx5_1:1/IB [RO]; OOB", ("mlx5_0+mlx5_1:1/IB",)),
        ("[0]mlx5_0:1:3:1/IB [1]mlx5_1:1:4:1/IB [RO]; OOB", ("mlx5_0:1:3:1/IB", "mlx5_1:1:4:1/IB")),
        ("[0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP ; OOB", ("mlx5_0:1/IB", "mlx5_1:1/IB")),
        ("[0]={[0] bnxt_re0:1/RoCE, [1] bnxt_re1:1/RoCE} [RO]; OOB", ("bnxt_re0:1/RoCE", "bnxt_re1:1/RoCE")),
        ("[0]mlx5_0_dma:1/RoCE [RO]; OOB", ("mlx5_0_dma:1/RoCE",)),
        ("[RO]; OOB", ()),
    ],
)
def test_lists_of_devices(listing: str, ports: tuple[str, ...]) -> None:
    """Merged NICs, rails and planes, SHARP, RCCL, data-direct devices, and the empty list."""
    assert evidence.read([f"{INFO}NET/IB : Using {listing} eth0:10.0.0.1<0>"]).hcas == ports


def test_gate_without_gdrdma() -> None:
    """A gate that does not ask for GPUDirect RDMA passes a proven socket run, and still fails a fault."""
    socket = evidence.read([net("Socket/0", "")])
    assert (evidence.exit_code(socket), evidence.exit_code(socket, require_gdrdma=False)) == (3, 0)
    broken = evidence.read([net(), WARNINGS[0][0]])
    assert evidence.exit_code(broken, require_gdrdma=False) == evidence.FAILED
    with pytest.raises(ValueError, match="fail_on is 'never'"):
        evidence.exit_code(socket, fail_on="never")


def test_what_the_plugin_sets_is_not_the_users() -> None:
    """aws-ofi-nccl sets variables itself, which NCCL prints as set by the environment."""
    lines = [
        f"{INFO}NCCL_BUFFSIZE set by environment to 8388608.",
        net("Libfabric/0"),
        net("Libfabric/0", direction="receive"),
    ]
    verdict = evidence.read(lines)
    assert (verdict.problems, verdict.notes) == ((), ())
    assert [note.code for note in evidence.read([lines[0], net()]).notes] == ["hand_tuned_env"]


def test_codes_are_documented() -> None:
    """docs/evidence.md lists every code under its severity; docs/findings.md explains each."""
    text = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    listed = {severity: re.findall(r"`(\w+)`", codes) for severity, codes in re.findall(r"- \*\*(\w+):\*\* (.+)", text)}
    assert listed == {
        severity: [code for code, meaning in CODES.items() if meaning.severity == severity] for severity in listed
    }
    assert sum(map(len, listed.values())) == len(CODES)


def test_every_sign_has_a_meaning() -> None:
    """No text leads to a code without an action."""
    assert {sign.code for sign in SIGNS} <= CODES.keys()
    assert {meaning.severity for meaning in CODES.values()} == {"info", "warn", "fail"}


def test_rows_of_the_tables_are_valid() -> None:
    """messages.toml and codes.toml: known keys only, texts without digits, patterns that compile, every piece used."""
    folder = Path(evidence_problems.__file__).parent
    data = tomllib.loads((folder / "messages.toml").read_text(encoding="utf-8"))
    source = (folder / "messages.toml").read_text(encoding="utf-8")
    wrong = [row for row in data["messages"]["rows"] if not {"code", "text"} <= row.keys()]
    wrong += [row for row in data["messages"]["rows"] if row.keys() - {"code", "text", "pattern", "own", "rising"}]
    assert wrong == []
    assert [sign for sign in SIGNS if not sign.needle.strip() or re.search(rb"\d", sign.needle)] == []
    assert [sign for sign in SIGNS if b"<<" in sign.pattern] == []
    groups = {sign: re.compile(sign.pattern).groups for sign in SIGNS}
    assert [sign for sign in SIGNS if sign.rising and groups[sign] < 2] == []
    assert [name for name in data["pieces"] if source.count(f"<<{name}>>") == 0] == []
    assert [code for code, meaning in CODES.items() if not (meaning.message and meaning.action)] == []


def test_every_code_can_be_reached() -> None:
    """A code that nothing gives is no vocabulary."""
    given = {sign.code for sign in SIGNS} | {meaning.other_provider for meaning in CODES.values()}
    source = "".join(Path(module.__file__).read_text() for module in (evidence_problems, evidence_lines, other_texts))
    assert [code for code in CODES if code not in given and f'"{code}"' not in source] == []


def test_the_message_that_names_the_reason_comes_before_the_cuda_error() -> None:
    lines = [
        "node-1:1:1 [1] include/alloc.h:228 NCCL WARN Cuda failure 800 'operation not permitted'",
        "node-1:1:1 [1] mnnvl.cc:67 NCCL WARN MNNVL (cliqueSize 8) is available but not working on this system.",
    ]
    assert [problem.code for problem in evidence.read(lines).problems] == ["mnnvl_not_working", "cuda_failure"]


def test_a_direction_that_was_not_seen_is_not_counted() -> None:
    """ "send 0 of 0" says nothing: only what channels were logged for is named."""
    lines = [f"{INFO}NCCL version 2.27.7+cuda12.9", f"{INFO}Channel 00/0 : 0[0] -> 8[0] [receive] via NET/IB/0"]
    (detail,) = (problem.message for problem in evidence.read(lines).problems if problem.code == "ib_without_gdrdma")
    assert "receive 0 of 1 channel" in detail
    assert "send" not in detail
