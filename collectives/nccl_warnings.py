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
    _sign(b"ibv_post_", "ib_call_failed", pattern=rb"ibv_post_(?:send|recv)\(\) failed"),
    # Verbs calls. "retrying" is no failure yet (2.27 on).
    _sign(b"ibv_reg_", "ib_reg_mr_failed", pattern=rb"ibv_reg_(?:dmabuf_)?mr\w* failed"),
    _sign(b"ibv_reg_", "memlock_too_small", pattern=rb"ibv_reg_(?:dmabuf_)?mr\w* failed.*(?:" + _ENOMEM + rb")"),
    _sign(b"ibv_create_", "ib_create_qp_failed", pattern=rb"ibv_create_(?:qp|cq)\w* failed"),
    _sign(b"ibv_create_", "memlock_too_small", pattern=rb"ibv_create_(?:qp|cq)\w* failed.*(?:" + _ENOMEM + rb")"),
    _sign(b"ibv_modify_qp", "ib_modify_qp_failed", pattern=rb"ibv_modify_qp failed(?!.*retrying)"),
    # EINVAL, and ENODATA for an entry that is gone.
    _sign(
        b"ibv_modify_qp",
        "gid_index_invalid",
        pattern=rb"ibv_modify_qp failed with (?:error )?(?:22\b|61\b|Invalid argument|No data available)(?!.*retrying)",
    ),
    _sign(b"ibv_query_gid", "gid_unreadable", pattern=rb"ibv_query_gid\w* failed"),
    _sign(b"ncclIbRoceGetVersionNum", "gid_unreadable", pattern=rb"(?:open|read) failed in ncclIbRoceGetVersionNum"),
    _sign(
        b"Call to ibv_",
        "ib_call_failed",
        pattern=rb"Call to ibv_(?:query_(?:device|port|qp)|alloc_pd|get_async_event|poll_cq|create_comp)\w*(?:\(\))? "
        rb"(?:failed|returned)",
    ),
    _sign(b"NET/IB : Unable to query ", "ib_call_failed"),
    # "async event" (to 2.22), "async error event" (2.23 to 2.27), "non-fatal async event" (2.28 on).
    _sign(b"async", "ib_port_error", pattern=rb"(?i)async (?:fatal |error )?event ?: port error"),
    _sign(b"async", "ib_async_event", pattern=rb"(?i)async fatal event|async (?:error )?event ?: (?!port )"),
    _sign(b"GID table changed", "ib_async_event"),
    _sign(b"incompatible", "mixed_link_layers", pattern=rb"incompatible devices: .*one link|device is incompatible"),
    # EFA.
    _sign(b"fi_getinfo", "no_efa_provider", pattern=rb"fi_getinfo\(\) call failed: No data available"),
    _sign(b"No eligible providers", "no_efa_provider"),
    _sign(b"NET/OFI Could", "no_efa_provider", pattern=rb"Could(?: not|n't) find any (?:optimal )?provider"),
    _sign(
        b"NET/OFI C",
        "efa_endpoint_failed",
        pattern=rb"NET/OFI (?:Couldn't (?:open|allocate|enable|bind) |Creating new endpoint .* failed)",
    ),
    _sign(b"NET/OFI Unable to register memory", "efa_memory_not_registered"),
    _sign(b"completed with error", "efa_request_failed", pattern=rb"NET/OFI .*completed with error"),
    _sign(b"nitializ", "efa_plugin_init_failed", pattern=rb"aws-ofi-nccl initialization failed"),
    _sign(b"NET/OFI Initializing plugin failed", "efa_plugin_init_failed"),
    _sign(b"NET/OFI Failed to initialize", "efa_plugin_init_failed"),
    # Networks.
    _sign(b"not found", "network_not_found", pattern=rb"[Nn]etwork \S.{0,40} not found"),
    _sign(b"initialize any NET plugin", "net_plugin_failed"),
    _sign(b"mixed local ", "net_device_count_mismatch", pattern=rb"Detected mixed local \w+ device counts"),
    _sign(b"not supported, and device", "gdr_not_supported_by_gin", pattern=rb"GIN: Peermem is not supported"),
    _sign(b"PXN Disabled as plugin", "pxn_disabled_plugin"),
    _sign(b"SHARP coll init error", "sharp_init_failed"),
    # Start.
    _sign(b"/dev/shm", "shm_too_small", pattern=rb"failed to extend /dev/shm"),
    _sign(b"shared memory segment", "shm_too_small", pattern=rb"Error while creating shared memory segment"),
    _sign(
        b"No space left on device",
        "shm_too_small",
        pattern=rb"(?:/dev/shm|shm|Call to (?:posix_fallocate|ftruncate)) .*No space left on device",
    ),
    _sign(b"shared memory segment", "shm_attach_failed", pattern=rb"Error while attaching to shared memory segment"),
    _sign(b"Duplicate GPU detected", "duplicate_gpu"),
    _sign(b"using the same GPU/Partition", "duplicate_gpu"),
    _sign(b"Mismatched NCCL version", "nccl_version_mismatch"),
    _sign(b"Message truncated : received", "nccl_version_mismatch"),
    _sign(
        b"Bootstrap Root : ", "bootstrap_mismatch", pattern=rb"mismatch in (?:rank count|info) from|already checked in"
    ),
    # A stranger at the port: another job, or a process left from an earlier one (2.16 to 2.26).
    _sign(b"socketFinalizeAccept", "bootstrap_mismatch", pattern=rb"socketFinalizeAccept.*: wrong (?:type|magic) "),
    _sign(
        b"ncclUniqueId",
        "rendezvous_timeout",
        pattern=rb"store->get\(.{0,80}got error: .{0,80}(?i:time ?out|timed out)",
    ),
    _sign(b"collective mismatch error", "collective_mismatch"),
    _sign(b"posted incorrect receive info", "collective_mismatch"),
    _sign(b"Mismatched collective detected", "collective_mismatch"),
    _sign(b"message truncated : receiving", "collective_mismatch"),
    _sign(b"No usable listening interface", "bootstrap_no_interface"),
    _sign(b"no socket interface found", "bootstrap_no_interface"),
    _sign(b"NET/Socket : no interface found", "bootstrap_no_interface"),
    _sign(b"NET/IB : No IP interface found", "bootstrap_no_interface"),
    _sign(b"no device found ", "bootstrap_no_interface", pattern=rb"no device found (?:matching|after excluding)"),
    _sign(b"is neither AF_INET", "bootstrap_no_interface", pattern=rb"connecting to address .{0,100} with family"),
    _sign(b"in the same subnet as remote", "no_interface_in_subnet"),
    # "retrying" is no failure yet; "exceeded error retry count" is one.
    _sign(
        b"onnect",
        "socket_connect_failed",
        pattern=rb"(?:[Cc]onnect(?: to| from)?\b|socketPollConnect|socketStartConnect|socketProgressOpt).*"
        rb"(?:Connection refused|Connection timed out|No route to host|is unreachable|connection abort|"
        rb"Cannot assign requested address)(?!.*retrying)",
    ),
    _sign(b"Socket creation failed", "socket_connect_failed"),
    _sign(b"onnect: exceeded ", "socket_connect_failed", pattern=rb"onnect: exceeded (?:retries|timeouts)"),
    _sign(b"losed by remote peer", "connection_closed_by_peer"),
    _sign(b"Connection reset by peer", "connection_closed_by_peer"),
    _sign(b"Broken pipe", "connection_closed_by_peer", pattern=rb"Call to send.* failed.*Broken pipe"),
    _sign(b"P2P is disabled between NVLINK", "p2p_disabled_nvlink"),
    _sign(b"P2P is disabled between connected", "p2p_disabled_by_driver"),
    _sign(b"available but not working", "mnnvl_not_working", pattern=rb"MNNVL .*available but not working"),
    _sign(b"Multicast memory", "nvls_bind_failed", pattern=rb"Failed to bind NVLink SHARP"),
    _sign(b"No transport found", "no_transport_found", pattern=rb"No transport found (?:for rank|!)"),
    _sign(b"no transport for ", "no_transport_found", pattern=rb"no transport for \w+ peer"),
    _sign(b"system not yet initialized", "fabric_manager_not_ready"),
    _sign(b"Cuda failure", "cuda_failure", pattern=rb"Cuda failure (?!(?:802 )?'system not yet)"),
    _sign(b"Failed to CUDA ", "cuda_failure", pattern=rb"Failed to CUDA (?:host )?c?alloc"),
    _sign(b"CUDA IPC handle", "cuda_failure", pattern=rb"failed to (?:open|get) CUDA IPC handle"),
    _sign(b"cudaIpcGetMemHandle failed", "cuda_failure"),
    _sign(b"failed to peer with device", "cuda_failure"),
    _sign(b"libnvidia-ml", "driver_mismatch", pattern=rb"Failed to open libnvidia-ml"),
    _sign(b"nvmlInit", "driver_mismatch", pattern=rb"nvmlInit\w*\(\) failed"),
    _sign(b"Minimum requirement is", "driver_mismatch", pattern=rb"CUDA Driver version found is"),
    # The driver's own line. 13, 31, 43, 45: the program's fault, or what follows; 63: a page retired as it should
    # (NVIDIA, "XID Errors").
    _sign(b"NVRM: Xid", "gpu_xid", pattern=rb"NVRM: Xid \([^)]{1,60}\): (?!(?:13|31|43|45|63)\b)\d"),
    _sign(b"Watchdog caught collective", "watchdog_timeout", pattern=rb"Watchdog caught collective operation timeout"),
    _sign(b"Heartbeat monitor timed out", "watchdog_timeout"),
    _sign(b"NCCL operations have failed or timed out", "watchdog_timeout"),
    _sign(
        b"opology file", "topo_file_missing", pattern=rb"Could not open XML topology file (?!/var/run/nvidia-topologyd)"
    ),
    _sign(b"NUMA", "numa_balancing_enabled", pattern=rb"(?i)NUMA (?:auto )?balancing (?:is )?enabled"),
    _sign(b"iommu=pt", "iommu_not_passthrough", pattern=rb"(?i)missing .{0,8}iommu=pt"),
    _sign(b"amd_iommu=on", "iommu_not_passthrough", pattern=rb"Missing .{0,8}amd_iommu=on"),
    _sign(b"Invalid value ", "invalid_env_value", pattern=rb"Invalid value .{0,80} for \w+, using default"),
    # The call gave up; setting up and tearing down communicators of several GPUs runs in threads of its own.
    _sign(b"[Async thread]", "call_failed", pattern=rb"group\.cc:\d+ -> [1-6] \[Async thread\]"),
    _sign(b"to execute operation ", "call_failed", pattern=rb"\[Proxy Service.* operation (?!Close|Stop)\w+ from"),
    _sign(b"Error encountered progressing operation", "call_failed", pattern=rb"operation=(?!Close|Stop)\w+, res="),
    _sign(b"Socket recv failed while polling", "call_failed"),
    # What PyTorch and nccl-tests make of it.
    _sign(b"NCCL ", "call_failed", pattern=rb"NCCL error(?: in)?: |NCCL Error [1-6]: |Test NCCL failure "),
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
