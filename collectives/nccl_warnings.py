"""Texts in NCCL, RCCL and plugin messages that name a fault, with the code of each.

Surface: WARN and INFO messages of NCCL 2.4 to 2.31 (src/misc/ibvwrap.cc, src/transport/net_ib*, src/init.cc,
src/bootstrap.cc, src/misc/socket.cc, src/misc/shmutils.cc, src/mnnvl.cc), RCCL (src/init.cc) and aws-ofi-nccl.
A needle is looked for first: a regular expression only runs on a line that has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """One text and what it says."""

    needle: bytes
    codes: tuple[str, ...]
    pattern: re.Pattern[bytes] | None = None


def _sign(needle: bytes, *codes: str, pattern: bytes | None = None) -> Sign:
    return Sign(needle, codes, re.compile(pattern) if pattern else None)


# "with error 12," (to 2.20), "with status=12 " (2.21 to 2.26), "status=IBV_WC_RETRY_EXC_ERR(12)" (2.28 on).
def _status(number: int, name: str) -> bytes:
    text = name.encode()
    return rb"(?:error |status=)%d\b|IBV_WC_%s\b" % (number, text)


def _completion(number: int, name: str, code: str) -> Sign:
    return Sign(
        b"ompletion", (code,), re.compile(rb"ompletion (?:from peer|with) ?.*(?:" + _status(number, name) + rb")")
    )


_ENOMEM = rb"Cannot allocate memory|ENOMEM|(?:error|errno|with) -?12\b"

SIGNS: tuple[Sign, ...] = (
    _sign(b"Unable to open device", "ibv_open_device_failed", pattern=rb"NET/IB : Unable to open device"),
    _sign(b"ibv_open_device failed", "ibv_open_device_failed"),
    _sign(b"open libibverbs", "libibverbs_missing", pattern=rb"(?:Failed to|Co(?:ul|un)[dt]? not) open libibverbs"),
    # Completions of work requests.
    _completion(12, "RETRY_EXC_ERR", "ib_retry_exceeded"),
    _sign(b"IBV_WC_RETRY_EXC_ERR", "ib_retry_exceeded"),
    _completion(13, "RNR_RETRY_EXC_ERR", "ib_rnr_retry_exceeded"),
    _completion(4, "LOC_PROT_ERR", "ib_local_protection_error"),
    _completion(5, "WR_FLUSH_ERR", "ib_flush_error"),
    _completion(10, "REM_ACCESS_ERR", "ib_remote_access_error"),
    _completion(11, "REM_OP_ERR", "ib_remote_access_error"),
    _sign(
        b"ompletion",
        "ib_completion_error",
        pattern=rb"Got completion (?:from peer|with) ?.*(?:error |status=)"
        rb"(?:IBV_WC_\w+\()?(?:[1236789]|1[4-9]|2[0-9])\b",
    ),
    # Verbs calls.
    _sign(b"ibv_reg_", "ib_reg_mr_failed", pattern=rb"ibv_reg_(?:dmabuf_)?mr\w* failed"),
    _sign(b"ibv_reg_", "memlock_too_small", pattern=rb"ibv_reg_(?:dmabuf_)?mr\w* failed.*(?:" + _ENOMEM + rb")"),
    _sign(b"ibv_create_", "ib_create_qp_failed", pattern=rb"ibv_create_(?:qp|cq)\w* failed"),
    _sign(b"ibv_create_", "memlock_too_small", pattern=rb"ibv_create_(?:qp|cq)\w* failed.*(?:" + _ENOMEM + rb")"),
    _sign(b"ibv_modify_qp", "ib_modify_qp_failed", pattern=rb"ibv_modify_qp failed"),
    # EINVAL, and ENODATA for an entry that is gone.
    _sign(
        b"ibv_modify_qp",
        "gid_index_invalid",
        pattern=rb"ibv_modify_qp failed with (?:error )?(?:22\b|61\b|Invalid argument|No data available)",
    ),
    _sign(b"async", "ib_port_error", pattern=rb"(?i)async (?:fatal )?event ?: port error|async event.*port error"),
    _sign(b"async", "ib_async_event", pattern=rb"(?i)async fatal event|async event ?: (?!port )"),
    _sign(b"GID table changed", "ib_async_event"),
    _sign(b"incompatible", "mixed_link_layers", pattern=rb"incompatible devices: .*one link|device is incompatible"),
    # EFA.
    _sign(b"fi_getinfo", "no_efa_provider", pattern=rb"fi_getinfo\(\) call failed: No data available"),
    _sign(b"No eligible providers", "no_efa_provider"),
    _sign(b"NET/OFI Could not find any", "no_efa_provider", pattern=rb"Could not find any (?:optimal )?provider"),
    _sign(
        b"NET/OFI C",
        "efa_endpoint_failed",
        pattern=rb"NET/OFI (?:Couldn't (?:open|allocate|enable|bind) |Creating new endpoint .* failed)",
    ),
    _sign(b"NET/OFI Unable to register memory", "efa_memory_not_registered"),
    _sign(b"nitializ", "efa_plugin_init_failed", pattern=rb"aws-ofi-nccl initialization failed"),
    _sign(b"NET/OFI Initializing plugin failed", "efa_plugin_init_failed"),
    _sign(b"NET/OFI Failed to initialize", "efa_plugin_init_failed"),
    # Networks.
    _sign(b"not found", "network_not_found", pattern=rb"[Nn]etwork \S.{0,40} not found"),
    _sign(b"initialize any NET plugin", "net_plugin_failed"),
    _sign(b"mixed local ", "net_device_count_mismatch", pattern=rb"Detected mixed local \w+ device counts"),
    _sign(b"not supported, and device", "gdr_not_supported_by_gin", pattern=rb"GIN: Peermem is not supported"),
    _sign(b"PXN Disabled as plugin", "pxn_disabled_plugin"),
    # Start.
    _sign(b"/dev/shm", "shm_too_small", pattern=rb"failed to extend /dev/shm|shared memory segment /dev/shm"),
    _sign(b"shared memory segment", "shm_too_small", pattern=rb"Error while creating shared memory segment"),
    _sign(b"No space left on device", "shm_too_small", pattern=rb"(?:/dev/shm|shm).*No space left on device"),
    _sign(b"Duplicate GPU detected", "duplicate_gpu"),
    _sign(b"using the same GPU/Partition", "duplicate_gpu"),
    _sign(b"Mismatched NCCL version", "nccl_version_mismatch"),
    _sign(b"Message truncated : received", "nccl_version_mismatch"),
    _sign(b"No usable listening interface", "bootstrap_no_interface"),
    _sign(b"no socket interface found", "bootstrap_no_interface"),
    _sign(b"NET/Socket : no interface found", "bootstrap_no_interface"),
    _sign(b"NET/IB : No IP interface found", "bootstrap_no_interface"),
    _sign(b"no device found ", "bootstrap_no_interface", pattern=rb"no device found (?:matching|after excluding)"),
    _sign(b"in the same subnet as remote", "no_interface_in_subnet"),
    _sign(
        b"onnect",
        "socket_connect_failed",
        pattern=rb"(?:[Cc]onnect(?: to| from)?\b|socketPollConnect|socketStartConnect|socketProgressOpt).*"
        rb"(?:Connection refused|Connection timed out|No route to host|Network is unreachable)(?!.*retry)",
    ),
    _sign(b"losed by remote peer", "connection_closed_by_peer"),
    _sign(b"Connection reset by peer", "connection_closed_by_peer"),
    _sign(b"P2P is disabled between NVLINK", "p2p_disabled_nvlink"),
    _sign(b"P2P is disabled between connected", "p2p_disabled_by_driver"),
    _sign(b"available but not working", "mnnvl_not_working", pattern=rb"MNNVL .*available but not working"),
    _sign(b"Multicast memory", "nvls_bind_failed", pattern=rb"Failed to bind NVLink SHARP"),
    _sign(b"No transport found for rank", "no_transport_found"),
    _sign(b"Cuda failure", "cuda_failure"),
    _sign(b"Watchdog caught collective", "watchdog_timeout", pattern=rb"Watchdog caught collective operation timeout"),
    _sign(
        b"opology file", "topo_file_missing", pattern=rb"Could not open XML topology file (?!/var/run/nvidia-topologyd)"
    ),
    _sign(b"NUMA", "numa_balancing_enabled", pattern=rb"(?i)NUMA (?:auto )?balancing (?:is )?enabled"),
    _sign(b"iommu=pt", "iommu_not_passthrough", pattern=rb"(?i)missing .{0,3}iommu=pt"),
    _sign(b"Invalid value ", "invalid_env_value", pattern=rb"Invalid value .{0,80} for \w+, using default"),
    # Shutdown of 2.19 to 2.24 and aborts: noise.
    _sign(b"[Service thread] Accept failed", "benign_teardown_warnings"),
    _sign(b"[Service thread] Could not receive type", "benign_teardown_warnings"),
    _sign(b"to execute operation Close", "benign_teardown_warnings"),
)

# Warnings that say nothing about the wire on any healthy system.
HARMLESS = re.compile(
    rb"NET/Plugin|TUNER/Plugin|PROFILER/Plugin|MSCCL|CollNet|COLLNET|SHARP|[Ss]ervice thread|ncclCommAbort|"
    rb"set by environment|GDRCOPY|gdrcopy|NCCL version"
)


def codes_of(message: bytes) -> tuple[str, ...]:
    """Codes that the message stands for, each once, in the order of the table."""
    found: dict[str, None] = {}
    for sign in SIGNS:
        if sign.needle in message and (sign.pattern is None or sign.pattern.search(message)):
            found.update(dict.fromkeys(sign.codes))
    return tuple(found)
