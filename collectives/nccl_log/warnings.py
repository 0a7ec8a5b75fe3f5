"""Texts in NCCL, RCCL and plugin messages that name a fault, with the code of each.

Surface: WARN, ATTN (2.32 on) and INFO messages of NCCL 2.4 to 2.32 (src/misc/ibvwrap.cc, src/transport/net_ib*,
src/init.cc, src/bootstrap.cc, src/misc/socket.cc, src/misc/shmutils.cc, src/mnnvl.cc), RCCL and aws-ofi-nccl.
A needle is looked for first: a regular expression only runs on a line that has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Sign:
    """One text and what it says."""

    needle: bytes
    codes: tuple[str, ...]
    pattern: re.Pattern[bytes] | None = None
    holds: Callable[[re.Match[bytes]], bool] | None = None  # what the pattern alone cannot tell
    own: bool = True  # nobody but NCCL, its plugins, a launcher or the kernel prints it: it counts on any line


def _sign(needle: bytes, *codes: str, pattern: bytes | None = None, own: bool = True) -> Sign:
    return Sign(needle, codes, re.compile(pattern) if pattern else None, own=own)


def _below_median(match: re.Match[bytes]) -> bool:
    return float(match[1]) < float(match[2])


# "with error 12," (to 2.20), "with status=12 " (2.21 to 2.26), "status=IBV_WC_RETRY_EXC_ERR(12)" (2.28 on).
def _status(number: int, name: str) -> bytes:
    text = name.encode()
    return rb"(?:error |status=)%d\b|IBV_WC_%s\b" % (number, text)


def _completion(number: int, name: str, code: str) -> Sign:
    return Sign(
        b"ot completion", (code,), re.compile(rb"ompletion (?:from peer|with) ?.*(?:" + _status(number, name) + rb")")
    )


_ENOMEM = rb"Cannot allocate memory|ENOMEM|(?:error|errno|with) -?12\b"

# How a job ends before its time: lines of the kernel, launchers, schedulers, Kubernetes, Python and PyTorch.
_SIGNAL_WORDS = (
    *(b"on signal", b"by signal", b"with signal", b"to signal", b"BY SIGNAL", b"(signal ", b"received by PID"),
    *(b"<Signals.", b"*** SIG", b"died from signal"),
)
_EXIT_WORDS = (
    *(b"xit code", b"xit Code", b"xit status", b"xitcode", b"xitCode", b"EXIT CODE", b"xited with code"),
    *(b"xit with status", b"xited with status", b"return code ="),
)


def _exits(needle: bytes) -> tuple[Sign, ...]:
    """An exit code by what it tells: a signal as -n or, from a shell or a container, as 128 + n; 0 is none."""
    word = rb"(?i:exit(?:ed)?[ _]?(?:with )?(?:exit )?(?:status code|code|status)|return code)\"?\s{0,3}[:=]?\s{0,8}"
    return (
        _sign(needle, "process_crashed", pattern=word + rb"(?:-(?:4|7|8|11)|132|135|136|139)\b"),
        _sign(needle, "process_aborted", pattern=word + rb"(?:-6|134)\b"),
        _sign(needle, "process_killed", pattern=word + rb"(?:-9|137)\b"),
        _sign(needle, "job_stopped", pattern=word + rb"(?:-15|-2|143|130)\b"),
        _sign(needle, "job_failed", pattern=word + rb"(?!(?:13[024-79]|143)\b)0{0,3}[1-9]\d{0,3}\b"),
    )


def _signals(needle: bytes) -> tuple[Sign, ...]:
    """A signal that ended a process, by number or name, in the words of launchers, Python, absl and glog."""

    def died(names: bytes, numbers: bytes) -> bytes:
        before = rb"(?:(?i:\b(?:on|by|with|to|died from) signal:?|\(signal)\s?(?:%s\b|%s\b)" % (names, numbers)
        return before + rb"|%s\b.{0,40}received by PID|<Signals\.%s\b|\*\*\* %s\b)" % (names, names, names)

    return (
        _sign(needle, "process_crashed", pattern=died(rb"SIG(?:SEGV|BUS|ILL|FPE)", rb"(?:4|7|8|11)")),
        _sign(needle, "process_aborted", pattern=died(rb"SIGABRT", rb"6")),
        _sign(needle, "process_killed", pattern=died(rb"SIGKILL", rb"9")),
        _sign(needle, "job_stopped", pattern=died(rb"SIG(?:TERM|INT)", rb"(?:15|2)")),
    )


_JOB_ENDS: tuple[Sign, ...] = (
    *(sign for needle in _SIGNAL_WORDS for sign in _signals(needle)),
    # Bash names the line, the process and the command; "(core dumped)" only where a core was written.
    *(
        _sign(words, "process_crashed", pattern=rb"(?:^|[:*] ?|\(|line \d+: +\d+ )" + words + rb"(?! (?:will|handler))")
        for words in (b"Segmentation fault", b"Bus error")
    ),
    # An abort is how a program ends itself after an error that it could not go on from: the error is the cause.
    _sign(b"Aborted", "process_aborted", pattern=rb"line \d+: +\d+ Aborted "),
    _sign(
        b"Aborted", "process_aborted", pattern=rb"Signal: Aborted|Aborted \(core dumped\)|Fatal Python error: Aborted"
    ),
    _sign(b"(core dumped)", "process_crashed", pattern=rb"(?<!Aborted )\(core dumped\)"),
    _sign(b"Caught signal", "process_crashed", pattern=rb"Caught signal (?:4|7|8|11)\b"),
    _sign(b"Caught signal", "process_aborted", pattern=rb"Caught signal 6\b"),
    _sign(b"Fatal Python error", "process_crashed", pattern=rb"Fatal Python error(?!: Aborted)"),
    _sign(b"terminate called after throwing", "process_aborted"),
    # PyTorch's loader of data, whose workers share /dev/shm.
    _sign(b"is killed by signal: ", "process_killed", pattern=rb"worker \(.{1,40} is killed by signal: Killed"),
    _sign(
        b"is killed by signal: ", "process_crashed", pattern=rb"worker \(.{1,40} is killed by signal: (?!Killed|Termin)"
    ),
    _sign(
        b"out of shared memory",
        "shm_too_small",
        pattern=rb"workers are out of shared memory|insufficient shared memory",
    ),
    _sign(b"insufficient shared memory", "shm_too_small"),
    # Killed: by the kernel for memory, or by SIGKILL from somewhere.
    _sign(b"ut of memory: Kill", "host_out_of_memory"),
    _sign(b"oom-kill", "host_out_of_memory", pattern=rb"oom-kill:|[1-9]\d* oom-kill event"),
    _sign(b"oom_kill event", "host_out_of_memory"),
    _sign(b"OOMKilled", "host_out_of_memory", pattern=rb"OOMKilled(?!\W{1,4}[Ff]alse)"),
    _sign(b"OOM Killed", "host_out_of_memory"),
    _sign(b"Out Of Memory", "host_out_of_memory", pattern=rb"(?:srun|slurmstepd): error: .*Out Of Memory"),
    _sign(b"out-of-memory handler", "host_out_of_memory"),
    _sign(b"running low on memory", "host_out_of_memory", pattern=rb"killed due to the node running low on memory"),
    _sign(b"killed due to memory pressure", "host_out_of_memory", pattern=rb"\b[1-9]\d* Workers .{0,40}killed due to"),
    _sign(
        b"memory limit", "host_out_of_memory", pattern=rb"slurmstepd: error: .*[Ee]xceeded (?:job|step) memory limit"
    ),
    _sign(b"TERM_MEMLIMIT", "host_out_of_memory"),
    _sign(b"job killed: ", "host_out_of_memory", pattern=rb"job killed: [vp]?v?mem\b"),
    _sign(
        b"Killed",
        "process_killed",
        pattern=rb"^\s*Killed\s*$|srun: error: \S+: tasks? [\d,-]+: Killed|line \d+: +\d+ Killed |"
        rb"flux-job: task\(s\) Killed",
    ),
    _sign(
        b"Terminated",
        "job_stopped",
        pattern=rb"srun: error: \S+: tasks? [\d,-]+: Terminated|line \d+: +\d+ Terminated |"
        rb"flux-job: task\(s\) Terminated|srun: Force Terminated",
    ),
    _sign(b"Terminating StepId=", "job_stopped"),
    # Ended by the scheduler.
    _sign(b"time limit", "time_limit_reached", pattern=rb"(?:exceeded|reached) (?:[\w ]{0,20} )?time limit"),
    _sign(b"TIME LIMIT", "time_limit_reached", pattern=rb"(?i:DUE TO TIME LIMIT)"),
    _sign(b"walltime", "time_limit_reached", pattern=rb"job killed: walltime"),
    _sign(b"TERM_RUNLIMIT", "time_limit_reached"),
    _sign(b"exceeded hard wallclock time", "time_limit_reached"),
    _sign(
        b"DeadlineExceeded",
        "time_limit_reached",
        pattern=rb"(?:[Rr]eason\W{1,4})DeadlineExceeded|\bDeadlineExceeded\b.*[Jj]ob",
    ),
    _sign(
        b"specified deadline",
        "time_limit_reached",
        pattern=rb"active (?:on the node )?longer than (?:the )?specified deadline",
    ),
    _sign(b"DUE TO PREEMPTION", "job_preempted"),
    _sign(
        b"reempted",
        "job_preempted",
        pattern=rb"(?:[Rr]eason\W{1,4}|^)Preempted\b|[Pp]reempted (?:by|to accommodate|in order)|"
        rb"(?:[Jj]ob|[Pp]od|[Ii]nstance|[Ww]orkload|[Nn]ode) .{0,60}(?:was|has been|is being) preempted",
    ),
    _sign(b"TERM_PREEMPT", "job_preempted"),
    _sign(b"TERM_OWNER", "job_cancelled"),
    _sign(b"Evicted", "job_preempted", pattern=rb"(?:[Rr]eason\W{1,4})Evicted"),
    _sign(b"low on resource:", "job_preempted", pattern=rb"node was low on resource:"),
    _sign(b"DUE TO NODE FAILURE", "node_failed"),
    _sign(b"NODE_FAIL", "node_failed"),
    _sign(b"Node failure on", "node_failed", pattern=rb"srun: error: Node failure on"),
    _sign(b"its node has died", "node_failed"),
    _sign(b"NodeDiedError", "node_failed"),
    _sign(b"lost communication with a remote daemon", "node_failed"),
    _sign(b"CANCELLED AT", "job_cancelled", pattern=rb"CANCELLED AT \S+(?! DUE )"),
    _sign(b"death signal", "job_stopped", pattern=rb"Received \S*SIG(?:TERM|INT)\S* death signal"),
    _sign(b"SIGTERM: ", "job_stopped", pattern=rb"Received SIGTERM: 15"),
    _sign(b"got signal: ", "job_stopped", pattern=rb"Process \d+ got signal: (?:15|2)\b"),
    # GPU memory and errors of the program's own calls.
    _sign(
        b"ut of memory",
        "gpu_out_of_memory",
        pattern=rb"(?:CUDA|HIP)(?: error:)? out of memory(?! (?:error|issue|problem|handl))|"
        rb"(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY|"
        rb"OutOfMemoryError: (?!Task)|RESOURCE_EXHAUSTED: Out of memory",
    ),
    _sign(b"CUDA error: ", "cuda_error", pattern=rb"CUDA error: (?!out of memory)"),
    _sign(b"HIP error: ", "cuda_error", pattern=rb"HIP error: (?!out of memory)"),
    # Ended with an error of its own: the launcher's words.
    _sign(b"ChildFailedError", "job_failed"),
    _sign(b"with non-zero status", "job_failed"),
    _sign(b"a non-zero exit code", "job_failed"),
    *(sign for needle in _EXIT_WORDS for sign in _exits(needle)),
    _sign(b"MPI_ABORT was invoked", "job_failed"),
    _sign(b"BAD TERMINATION OF ONE", "job_failed"),
    _sign(b"Job step aborted", "job_failed"),
    _sign(
        b"died unexpectedly", "job_failed", pattern=rb"(?:[Aa]ctor|[Ww]orker|Engine|proc\w*).{0,60} died unexpectedly"
    ),
    _sign(b"ActorDiedError", "job_failed"),
    *(_sign(error, "job_failed") for error in (b"RayActorError", b"WorkerCrashedError")),
    _sign(b"by an unexpected system error", "job_failed"),
    _sign(b"distributed service detected fatal errors", "job_failed"),
    _sign(b"EngineDeadError", "job_failed"),
    _sign(b"EngineCore encountered a", "job_failed", pattern=rb"EngineCore encountered a fatal error"),
    _sign(b"backoff limit", "job_failed", pattern=rb"reached the specified backoff limit"),
    _sign(b"BackoffLimitExceeded", "job_failed"),
    _sign(b"CrashLoopBackOff", "job_failed"),
    _sign(b"replica(s) failed", "job_failed", pattern=rb"is failed because \d+ \w+ replica\(s\) failed"),
    _sign(b"raysubmit_", "job_failed", pattern=rb"Job '[\w.-]+' failed\b"),
    _sign(
        b"terminated with code", "job_failed", pattern=rb"[Cc]hild process with PID \d+ terminated with code -?[1-9]"
    ),
    _sign(b"Terminating the process after", "watchdog_timeout", pattern=rb"ProcessGroupNCCL watchdog hang"),
)

# NCCL_RUN_DIAGNOSTICS and NCCL_RUN_RAS_DIAGNOSTICS (2.31 on): "host:pid NCCL DIAG [INFO] net bw: ...", and the same
# from RAS's socket without the prefix; [OK] and the lines of the frame say nothing (docs/userguide/source/
# troubleshooting/diagnostics.rst, and the texts in libnccl.so.2 of the wheels nvidia-nccl-cu13 2.31.2 and 2.32.3).
_INCOMPLETE = (
    rb"incomplete|unavailable|unable to|missing|not support|cannot |no usable|skipp|invalid |not usable|truncated|"
    rb"(?:setup|cleanup) failed|bootstrap failure|returned \d|mixed results|inaccessible|require root|could not|"
    rb"no kernel-log"
)


def _diagnosed(code: str, pattern: bytes, needle: bytes = b"NCCL DIAG [INFO]") -> Sign:
    return _sign(needle, code, pattern=rb"(?:NCCL DIAG |^ *)\[INFO\] +" + pattern)


# 13, 31, 43, 45: the program's fault, or what follows; 63: a page retired as it should (NVIDIA, "XID Errors")
_XID = rb"(?!(?:13|31|43|45|63)\b)\d"
_NO_DATA = rb"(?!.*(?:" + _INCOMPLETE + rb"))"
_OF_RAS = b" in comm "  # its lines name the communicator
_DIAGNOSTICS: tuple[Sign, ...] = (
    _diagnosed(
        "diag_p2p_failed",
        rb"p2p: (?:(?:only )?\d+/\d+ |\w+ mismatch|(?:peer-memory import|topology check|launch/check) failed)",
    ),
    replace(
        _diagnosed("diag_net_slow", rb"net bw: .*: (\d{1,9}\.?\d{0,9}) Gbit/s, >30% off median (\d{1,9}\.?\d{0,9})"),
        holds=_below_median,
    ),
    _diagnosed("diag_net_failed", rb"net bw: .*(?:tool run|timed out|did not start|no bandwidth data)"),
    _diagnosed("diag_net_failed", rb"rdma_topo check: failed on rank", _OF_RAS),
    _diagnosed("diag_ecc", rb"ECC: " + _NO_DATA, _OF_RAS),
    _diagnosed(
        "diag_nvlink_down",
        rb"(?:NVLink|XGMI)[^:]*: " + _NO_DATA + rb".*(?:inactive|down|not active|mismatch|differ|inconsistent)",
        _OF_RAS,
    ),
    _diagnosed(
        "diag_mismatch",
        rb"(?:GPU inventory|NCCL environment|[\w ]{3,40} version): .*(?:mismatch|differ)",
        _OF_RAS,
    ),
    _diagnosed("iommu_not_passthrough", rb"IOMMU mode: enabled", _OF_RAS),
    _diagnosed("gpu_xid", rb"Xid " + _XID + rb"\d* detected (?!.*No user action)", b"Xid "),
    _diagnosed("diag_nvlink_down", rb"SXid \d+ detected (?!.*No user action).*reported Fatal", b"SXid "),
    _sign(
        b"NCCL DIAG", "diag_incomplete", pattern=rb"NCCL DIAG (?:INFO .*skipped|\[INFO\] .*(?:" + _INCOMPLETE + rb"))"
    ),
)

# "retrying (33/34)" is no failure yet, the last one is.
_UNREACHED = (
    rb"(?:Connection refused|Connection timed out|No route to host|is unreachable|connection abort|"
    rb"Cannot assign requested address)(?!.*retrying(?! \((\d+)/\1\)))"
)

_LIBFABRIC = rb"libfabric:\d+:(?:\d+:)?(?:[^:\s]*:)?"  # pid, time (1.13 on), what the caller put before
# A warning that carries an error number, or says that a request or a peer was lost; start-up noise carries neither.
_LIBFABRIC_ERROR = (
    rb"(?:handle_error\(|\berr(?:or|no)?: ?-?\d|prov_err|completion error|Unresponsive receiver|"
    rb"(?:[Rr]equest|[Oo]peration|[Tt]ransfer|[Cc]onnection) (?:timed out|failed|aborted))"
)

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
        b"ot completion",
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
    _sign(b"async", "ib_port_error", pattern=rb"(?i)async (?:fatal |error )?event ?: port error", own=False),
    _sign(b"async", "ib_async_event", pattern=rb"(?i)async fatal event|async (?:error )?event ?: (?!port )", own=False),
    _sign(b"GID table changed", "ib_async_event"),
    _sign(
        b"incompatible",
        "mixed_link_layers",
        pattern=rb"incompatible devices: .*one link|device is incompatible",
        own=False,
    ),
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
    # Libfabric's own lines: "libfabric:42:1700000000:efa:cq:efa_rdm_txe_handle_error():244<warn> err: 5, message: ...".
    *(
        _sign(b"libfabric:", code, pattern=_LIBFABRIC + provider + rb":\w+:.*" + _LIBFABRIC_ERROR)
        for provider, code in (
            (b"efa", "efa_request_failed"),
            (b"cxi", "slingshot_request_failed"),
            (rb"(?:verbs|tcp|sockets|psm[23]?|opx|gni|ofi_rx[md]|shm|ucx|lnx|net|udp|mlx)", "libfabric_request_failed"),
        )
    ),
    _sign(
        b"Event Queue overflow", "slingshot_request_failed", pattern=rb"[Cc]assini Event Queue overflow|cxi.*overflow"
    ),
    _sign(b"aws-ofi-nccl initialization failed", "efa_plugin_init_failed"),
    _sign(b"NET/OFI Initializing plugin failed", "efa_plugin_init_failed"),
    _sign(b"NET/OFI Failed to initialize", "efa_plugin_init_failed"),
    # Networks.
    _sign(b"not found", "network_not_found", pattern=rb"[Nn]etwork \S.{0,40} not found", own=False),
    _sign(b"initialize any NET plugin", "net_plugin_failed"),
    # A device number of a peer with more devices, or of a device that is gone (2.20 on).
    _sign(b"vNics have been created", "net_device_count_mismatch"),
    _sign(b"mixed local ", "net_device_count_mismatch", pattern=rb"Detected mixed local \w+ device counts"),
    _sign(b"not supported, and device", "gdr_not_supported_by_gin", pattern=rb"GIN: Peermem is not supported"),
    _sign(b"PXN Disabled as plugin", "pxn_disabled_plugin"),
    _sign(b"SHARP coll init error", "sharp_init_failed"),
    _sign(b"SHARP group create", "sharp_init_failed"),
    _sign(b"disabling GDR", "gdr_refused_by_plugin", pattern=rb"NET/OFI .*disabling GDR\b"),
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
    _sign(b"onnect", "socket_connect_failed", pattern=rb"[Cc]onnect(?: to| from)?\b.*" + _UNREACHED, own=False),
    *(
        _sign(name, "socket_connect_failed", pattern=name + rb".*" + _UNREACHED)
        for name in (b"ocketPollConnect", b"ocketStartConnect", b"ocketProgress", b"Call to connect")
    ),
    _sign(b"Socket creation failed", "socket_connect_failed", own=False),
    _sign(b"onnect: exceeded ", "socket_connect_failed", pattern=rb"onnect: exceeded (?:retries|timeouts)"),
    _sign(b"losed by remote peer", "connection_closed_by_peer", own=False),
    _sign(b"Connection reset by peer", "connection_closed_by_peer", own=False),
    _sign(b"Broken pipe", "connection_closed_by_peer", pattern=rb"Call to send.* failed.*Broken pipe", own=False),
    _sign(b"is disabled between NVLINK", "p2p_disabled_nvlink"),
    _sign(b"is disabled between connected", "p2p_disabled_by_driver"),
    _sign(b"Could not enable P", "p2p_disabled_by_driver", pattern=rb"Could not enable P2P between dev"),
    _sign(b"available but not working", "mnnvl_not_working", pattern=rb"MNNVL .*available but not working"),
    _sign(b"MNNVL", "mnnvl_not_working", pattern=rb"MNNVL is not supported on this system"),
    _sign(b"DEGRADED_BANDWIDTH", "nvlink_degraded"),
    # 2.31 on, with NCCL_IB_WQE_LATENCY_THRESHOLD_NS.
    _sign(b"NET/IB: WQE st", "ib_request_stalled", pattern=rb"WQE stall \(no CQE\): peer="),
    _sign(b"to bind NVLink SHARP", "nvls_bind_failed"),
    _sign(
        b"cuMemImport",
        "cuda_memory_not_shared",
        pattern=rb"cuMemImportFromShareableHandle.*(?:fail|error)|"
        rb"(?i:fail|error).*cuMemImport",
    ),
    _sign(b"Cuda failure", "cuda_memory_not_shared", pattern=rb"cuMemImport.*Cuda failure|Cuda failure.*cuMemImport"),
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
    # The driver's own line.
    _sign(b"NVRM: Xid", "gpu_xid", pattern=rb"(?:NVRM: Xid \([^)]{1,60}\): |caused by previous Xid )" + _XID),
    _sign(b"Watchdog caught collective", "watchdog_timeout", pattern=rb"Watchdog caught collective operation timeout"),
    *(_sign(needle, "watchdog_timeout") for needle in (b"NCCL operation timed out", b"due to timeout on rank")),
    *(_sign(needle, "call_failed") for needle in (b"nccl hit async error", b"NCCL Async Error")),
    _sign(b"Heartbeat monitor timed out", "watchdog_hung"),
    _sign(b"watchdog got stuck for", "watchdog_hung"),
    _sign(b"timed out in blocking wait", "watchdog_timeout"),
    _sign(b"Timed out waiting", "watchdog_timeout", pattern=rb"Timed out waiting \d+ms for (?:recv|send) operation"),
    _sign(b"connectFullMesh failed", "socket_connect_failed"),
    _sign(b"fallen off the bus and is not", "gpu_xid", pattern=rb"NVRM: .*fallen off the bus and is not responding"),
    _sign(b"NCCL operations have failed or timed out", "watchdog_timeout"),
    _sign(
        b"opology file", "topo_file_missing", pattern=rb"Could not open XML topology file (?!/var/run/nvidia-topologyd)"
    ),
    _sign(b"NUMA", "numa_balancing_enabled", pattern=rb"(?i)NUMA (?:auto )?balancing (?:is )?enabled", own=False),
    _sign(
        b"HSA_FORCE_FINE_GRAIN_PCIE", "fine_grained_memory_off", pattern=rb"(?i)missing .{0,8}HSA_FORCE_FINE_GRAIN_PCIE"
    ),
    # net_tcpx.cc "rx ctrl timeout cnt 2, nanos 10000000000", stats/tracepoint.cc "tx timeout error 11, ...".
    _sign(b", nanos ", "tcpx_timeout", pattern=rb"\b[rt]x (?:ctrl )?timeout (?:error|cnt) .*\bnanos \d"),
    _sign(b"iommu=pt", "iommu_not_passthrough", pattern=rb"(?i)missing .{0,8}iommu=pt"),
    _sign(b"amd_iommu=on", "iommu_not_passthrough", pattern=rb"Missing .{0,8}amd_iommu=on"),
    _sign(b"Invalid value ", "invalid_env_value", pattern=rb"Invalid value .{0,80} for \w+, using default", own=False),
    # The call gave up; setting up and tearing down communicators of several GPUs runs in threads of its own.
    _sign(b"[Async thread]", "call_failed", pattern=rb"group\.cc:\d+ -> [1-6] \[Async thread\]"),
    _sign(b"to execute operation ", "call_failed", pattern=rb"\[Proxy Service.* operation (?!Close|Stop)\w+ from"),
    _sign(b"Error encountered progressing operation", "call_failed", pattern=rb"operation=(?!Close|Stop)\w+, res="),
    _sign(b"Socket recv failed while polling", "call_failed"),
    # What PyTorch and nccl-tests make of it.
    _sign(
        b"NCCL ",
        "call_failed",
        pattern=rb"NCCL error(?: in)?: |NCCL Error [1-6]: |Test NCCL failure |"
        rb"NCCL operation \w+(?:\([^)]*\))? failed|NCCL communicator was aborted",
    ),
    *(
        _sign(b"nccl" + kind + b"Error: ", "call_failed")
        for kind in (b"System", b"Internal", b"Remote", b"UnhandledCuda", b"InvalidUsage")
    ),
    _sign(b"DistBackendError", "call_failed", pattern=rb"DistBackendError: "),
    _sign(b"clients joined", "rendezvous_timeout", pattern=rb"Timed out after .{1,40} waiting for clients"),
    _sign(b"RendezvousTimeoutError", "rendezvous_timeout"),
    _sign(b"collective timeout", "watchdog_timeout", pattern=rb"dump signal due to a collective timeout"),
    # nccl-tests: what arrived was not what was sent.
    _sign(b"Out of bounds values", "wrong_results", pattern=rb"Out of bounds values : [1-9]\d* FAILED"),
    *_JOB_ENDS,
    *_DIAGNOSTICS,
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


# What must be looked for where no header of NCCL's stands before it.
SEARCHED: tuple[bytes, ...] = tuple(dict.fromkeys(sign.needle for sign in SIGNS if sign.own))
_NEEDLES: tuple[bytes, ...] = tuple(dict.fromkeys(sign.needle for sign in SIGNS))
_OF_NEEDLE = {
    needle: tuple(number for number, sign in enumerate(SIGNS) if sign.needle == needle) for needle in _NEEDLES
}


@lru_cache(maxsize=4_096)
def _needles_in(shape: bytes) -> tuple[bytes, ...]:
    """Needles of a message without its digits, which no needle has: messages differ by their numbers most."""
    return tuple(needle for needle in _NEEDLES if needle in shape)


def codes_of(message: bytes, *, foreign: bool = False) -> tuple[str, ...]:
    """Codes that the message stands for, each once, in the order of the table.

    ``foreign``: nothing says that the line is NCCL's; only texts that nobody else prints count.
    """
    needles = _needles_in(message.translate(None, b"0123456789"))
    if not needles:  # the usual case
        return ()
    found: dict[str, None] = {}
    for sign in (SIGNS[number] for number in sorted(number for needle in needles for number in _OF_NEEDLE[needle])):
        if sign.own or not foreign:
            match = sign.pattern.search(message) if sign.pattern else None
            if (match or not sign.pattern) and not (match and sign.holds and not sign.holds(match)):
                found.update(dict.fromkeys(sign.codes))
    return tuple(found)
