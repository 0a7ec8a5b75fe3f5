"""Every problem the reader of NCCL logs can name: what it means, and the first thing to do.

Surface: the vocabulary of ``LogProblem.code``; docs/evidence.md holds the same table. ``fail`` means that the log
proves a fault or a slow path between nodes, ``warn`` that something deserves a look, ``info`` that it is by design.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One code."""

    severity: str  # "info", "warn", "fail"
    message: str
    action: str
    gdr: bool = False  # says only that GPUDirect RDMA is missing: a gate that does not ask for it passes
    ends: bool = False  # the job, or one of its processes, ended by it


def _end(message: str, action: str) -> Meaning:
    return Meaning(severity="fail", message=message, action=action, ends=True)


def _fail(message: str, action: str, *, gdr: bool = False) -> Meaning:
    return Meaning(severity="fail", message=message, action=action, gdr=gdr)


def _warn(message: str, action: str) -> Meaning:
    return Meaning(severity="warn", message=message, action=action)


def _info(message: str, action: str) -> Meaning:
    return Meaning(severity="info", message=message, action=action)


CODES: dict[str, Meaning] = {
    # --- what the channels show
    "no_transport_evidence": _warn(
        "no channel line and no failure: the log proves nothing about the wire",
        "run a collective with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,P2P,SHM; with NCCL 2.22 or "
        "later set NCCL_RUNTIME_CONNECT=0 or read the log after the first collective",
    ),
    "no_inter_node_evidence": _warn(
        "several nodes, but no channel line between nodes",
        "collect the logs of all ranks after the first collective that crosses nodes",
    ),
    "one_direction_seen": _warn(
        "channels between nodes were seen in one direction only: GPUDirect RDMA of the other is unknown",
        "collect the logs of all ranks: every channel is printed by its sender and by its receiver",
    ),
    "torn_channel_lines": _warn(
        "channel lines were cut before their tag: GPUDirect RDMA cannot be read from them",
        "write one file per process with NCCL_DEBUG_FILE=/path/%h.%p",
    ),
    "ib_without_gdrdma": _fail(
        "InfiniBand or RoCE channels without GPUDirect RDMA: data is staged through host memory",
        "load nvidia_peermem or use a DMA-BUF capable kernel and driver; check the GPU-NIC path "
        "(PXB or nearer) and ACS",
        gdr=True,
    ),
    "efa_without_gdrdma": _fail(
        "EFA channels without GPUDirect RDMA; expected only on instances without it (p3dn, g5, g6, p5.4xlarge)",
        "on p4d, p5 and p6 check the EFA kernel module, libfabric and the aws-ofi-nccl version",
        gdr=True,
    ),
    "slingshot_without_gdrdma": _fail(
        "Slingshot (cxi) channels without GPUDirect RDMA: data is staged through host memory",
        "check that libfabric was built with CUDA (or ROCr) and GDRCopy, and that the plugin's log says DMA-BUF or "
        "HMEM is supported; on HPE's advice set FI_CXI_DISABLE_HOST_REGISTER=1 and FI_HMEM_CUDA_USE_GDRCOPY=1",
        gdr=True,
    ),
    "libfabric_over_tcp": _fail(
        "libfabric's tcp provider joins the nodes: the same as sockets",
        "find why libfabric chose no RDMA provider: fi_info in the container, FI_PROVIDER, the devices it was given",
        gdr=True,
    ),
    "net_without_gdrdma": _fail(
        "network channels without GPUDirect RDMA",
        "check whether this network plugin and this GPU support it, and that peermem or DMA-BUF is at hand",
        gdr=True,
    ),
    "gdr_partial": _fail(
        "only part of the network channels use GPUDirect RDMA",
        "compare GPU-NIC paths and drivers of the devices and hosts that lack it",
        gdr=True,
    ),
    "gdr_read_disabled_pre_ampere": _info(
        "GPUDirect RDMA on receive and not on send: NCCL's default before Ampere without NVLink",
        "nothing; NCCL_NET_GDR_READ=1 tries it on send, measure before keeping it",
    ),
    "gdr_not_supported_by_gpu": _info(
        "network channels without GPUDirect RDMA, which these GPUs do not have by design (GB10, GeForce)",
        "nothing: data goes through host memory, which GB10 shares with the GPU",
    ),
    "gdr_read_disabled_by_env": _warn(
        "GPUDirect RDMA on receive and not on send, and NCCL_NET_GDR_READ is set",
        "unset NCCL_NET_GDR_READ",
    ),
    "gdr_disabled_by_env": _fail(
        "NCCL_NET_GDR_LEVEL or NCCL_IB_CUDA_SUPPORT turns GPUDirect RDMA off", "unset it", gdr=True
    ),
    "gdr_distance_too_far": _warn(
        "NCCL found every GPU-NIC pair too far apart for GPUDirect RDMA",
        "check the placement of GPUs and NICs on PCIe switches (in a VM: the topology file)",
    ),
    "gdr_refused_by_plugin": _fail(
        "the libfabric plugin turned GPUDirect RDMA off",
        "none on EFA of g5 and g6; else compare libfabric, the EFA driver and the plugin's version",
        gdr=True,
    ),
    "peermem_missing": _fail(
        "NCCL's test for GPUDirect RDMA failed on the HCA: no peer memory module and no DMA-BUF",
        "modprobe nvidia-peermem (nv_peer_mem on old drivers), or use the open kernel modules with Linux 5.12 or later",
        gdr=True,
    ),
    "socket_fallback": _fail(
        "TCP sockets between nodes",
        "find why no RDMA network was chosen: devices in the container, the plugin, memlock, NCCL_IB_DISABLE, NCCL_NET",
        gdr=True,
    ),
    "net_only_within_node": _fail(
        "all channels between the GPUs of one host go through the network, P2P and shared memory are not used",
        "unset NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_SHM_DISABLE",
    ),
    "several_runs": _info("the log holds several runs: each is judged on its own", "nothing"),
    "mixed_networks": _fail(
        "ranks chose different networks", "give every node the same devices, plugin and environment"
    ),
    "net_within_node": _warn(
        "ranks of one node talk through the network",
        "check NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and NCCL_HOSTID",
    ),
    "shm_across_pairs": _warn(
        "some GPU pairs of a node talk through host memory: they bound every ring",
        "keep groups within NVLink pairs or one PCIe switch; nvidia-smi topo -m shows them",
    ),
    "p2p_level_limited_by_env": _warn(
        "NCCL_P2P_LEVEL keeps GPU pairs from P2P: they go through host memory", "unset NCCL_P2P_LEVEL and measure"
    ),
    "p2p_disabled_by_env": _warn("NCCL_P2P_DISABLE=1: all pairs of a node go through host memory", "unset it"),
    "p2p_disabled_by_driver": _warn(
        "the driver refuses P2P between GPUs that are connected",
        "check ACS and the virtual machine's PCIe topology; consumer GPUs have no P2P",
    ),
    "p2p_disabled_nvlink": _fail(
        "P2P is disabled between GPUs joined by NVLink",
        "check the fabric manager, nvidia-smi nvlink -s, and restart the driver",
    ),
    "nvlink_degraded": _fail(
        "NVLink's fabric says that it runs at less than its bandwidth",
        "nvidia-smi nvlink -s and nvidia-smi -q (Fabric) on that node; then the fabric manager's log",
    ),
    "mixed_link_layers": _warn("InfiniBand and RoCE devices together", "name the devices of one fabric in NCCL_IB_HCA"),
    "dead_port": _warn(
        "an expected RDMA port is not among the ports NCCL uses: NCCL lists active ports only",
        "check the port's state, cable and switch; then the device in the container",
    ),
    "sharp_init_failed": _warn(
        "SHARP was asked for and could not start: collectives go without it",
        "check the SHARP aggregation manager of the fabric, or unset NCCL_COLLNET_ENABLE",
    ),
    "pxn_disabled_plugin": _info("the network plugin is too old for PXN", "update the plugin"),
    # --- environment
    "hand_tuned_env": _warn(
        "hand-set tuning variables and no proof of what they did", "unset them, measure, and keep only what pays"
    ),
    "ib_disabled_by_env": _fail("NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE", gdr=True),
    "socket_forced_by_env": _fail("NCCL_NET=Socket is set", "unset NCCL_NET", gdr=True),
    "unknown_level_value": _warn(
        "a path level that NCCL does not know: it is ignored",
        "use LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB or SYS in capitals",
    ),
    "invalid_env_value": _warn("a variable whose value NCCL could not read", "correct the value"),
    "docker_interface_used": _warn(
        "NCCL chose a container bridge, loopback or virtual-machine bridge for its sockets",
        "set NCCL_SOCKET_IFNAME to the interface that reaches the peers",
    ),
    # --- devices and plugins
    "no_ib_device": _warn(
        "NCCL found no RDMA device", "give the container /dev/infiniband and the device; check ibv_devinfo there"
    ),
    "ibv_open_device_failed": _fail(
        "RDMA devices are visible and cannot be opened",
        "mount /dev/infiniband into the container (device plugin) and check its permissions",
    ),
    "libibverbs_missing": _fail("libibverbs could not be loaded", "install rdma-core's libibverbs in the image"),
    "efa_plugin_init_failed": _fail(
        "the aws-ofi-nccl plugin failed to initialise: NCCL falls back or fails",
        "check that the pod asks for vpc.amazonaws.com/efa, and the plugin and libfabric versions",
    ),
    "no_efa_provider": _fail(
        "libfabric offers no EFA provider", "check fi_info -p efa in the container and the EFA devices it was given"
    ),
    "efa_endpoint_failed": _fail(
        "libfabric could not open an endpoint on an EFA device",
        "compare the versions of the EFA driver, libfabric and aws-ofi-nccl; check the devices in the container and "
        "hugepages or memlock",
    ),
    "efa_memory_not_registered": _fail(
        "aws-ofi-nccl could not register memory with EFA",
        "check the EFA kernel module's GPU support; with EFA installers before 1.29.1 set "
        "FI_EFA_SET_CUDA_SYNC_MEMOPS=0",
    ),
    "efa_request_failed": _fail(
        "a transfer over EFA failed: the peer did not answer, or could not be reached",
        "let the security group of all nodes pass all traffic to itself, in and out; then look for the node whose "
        "process or EFA device died first",
    ),
    "slingshot_request_failed": _fail(
        "a transfer over Slingshot (cxi) failed",
        "check the links of the named node (cxi_stat, fabric manager) and dmesg; for overflows of the event queue set "
        "FI_CXI_DEFAULT_CQ_SIZE=131072 and FI_CXI_RX_MATCH_MODE=hybrid",
    ),
    "libfabric_request_failed": _fail(
        "a transfer over libfabric failed: the peer did not answer, or could not be reached",
        "check fi_info and fi_pingpong between the nodes with this provider; then look for the node that failed first",
    ),
    "libfabric_setup_failed": _fail(
        "libfabric could not open an endpoint, or register memory, with this provider",
        "check fi_info -p PROVIDER in the container, its devices and memlock; compare libfabric and the plugin",
    ),
    "libfabric_plugin_failed": _fail(
        "the libfabric plugin failed to initialise: NCCL falls back or fails",
        "check fi_info in the container: which providers it lists, and FI_PROVIDER",
    ),
    "network_not_found": _fail(
        "the network that NCCL_NET asks for did not load", "unset NCCL_NET or install the plugin it names"
    ),
    "net_plugin_failed": _fail("no network could be initialised", "look for the first warning of the plugin"),
    "net_device_count_mismatch": _warn(
        "ranks see different numbers of network devices", "give every rank the same devices; look for a dead port"
    ),
    "topo_file_missing": _warn("the topology file that is asked for cannot be read", "correct NCCL_TOPO_FILE"),
    "gdr_not_supported_by_gin": _warn("device-initiated networking needs peermem or DMA-BUF", "load nvidia-peermem"),
    "tcpx_timeout": _warn(
        "GPUDirect-TCPX has waited 10 s or longer on a connection",
        "look at the peer's log: its process waits or has ended, else its NIC's rules for received flows are missing",
    ),
    # --- verbs failures
    "ib_retry_exceeded": _fail(
        "transport retry exceeded (12): the peer did not answer",
        "check the remote port, fabric, route and QoS between the two named ends; it is not a local setting",
    ),
    "ib_rnr_retry_exceeded": _fail(
        "receiver-not-ready retry exceeded (13)", "look at the peer: its process was dead or too slow to post receives"
    ),
    "ib_local_protection_error": _fail(
        "local protection error (4): the NIC could not reach the memory",
        "turn off PCIe ACS (bare metal) or check IOMMU and ATS settings",
    ),
    "ib_flush_error": _info("work request flushed (5): follows from an earlier error", "look for the first error"),
    "ib_remote_access_error": _fail(
        "remote access or operation error (10, 11)", "look at the peer's log for the first error"
    ),
    "ib_completion_error": _fail("a work request failed", "look up the status in the verbs documentation"),
    "memlock_too_small": _fail(
        "memory could not be pinned: the locked-memory limit",
        "raise memlock: docker --ulimit memlock=-1, the container runtime's LimitMEMLOCK, "
        "Slurm PropagateResourceLimitsExcept=MEMLOCK",
    ),
    "ib_reg_mr_failed": _fail(
        "memory registration failed", "raise memlock if memory is named; else check nvidia-peermem and DMA-BUF"
    ),
    "ib_create_qp_failed": _fail("a queue pair or completion queue could not be made", "raise memlock, then QP limits"),
    "gid_index_invalid": _fail(
        "the GID index does not lead to the peer",
        "with NCCL 2.21 or later unset NCCL_IB_GID_INDEX; before, set it to the RoCE v2 entry of show_gids",
    ),
    "ib_modify_qp_failed": _fail(
        "a queue pair could not be connected", "check GID index, subnet and route between the named ends"
    ),
    "gid_unreadable": _fail(
        "the GID table of an RDMA port could not be read",
        "look at /sys/class/infiniband/*/ports/*/gid_attrs in the container; NCCL 2.26 or later skips empty entries",
    ),
    "ib_call_failed": _fail("a verbs call failed", "check ibv_devinfo -v on that host, in the container"),
    "ib_port_error": _fail("an RDMA port went down while running", "check the cable, transceiver and switch port"),
    "ib_async_event": _warn("the RDMA device reported an event", "check the device and the kernel log"),
    "ib_request_stalled": _warn(
        "an RDMA device got no completion of what it sent for longer than it may take",
        "look at that device, its cable and the peer that the line names",
    ),
    # --- start of the job
    "shm_too_small": _fail(
        "the shared memory file system (/dev/shm) is too small",
        "docker --shm-size=1g; in Kubernetes an emptyDir with medium: Memory at /dev/shm",
    ),
    "shm_attach_failed": _fail(
        "shared memory of another rank could not be opened: the ranks do not share /dev/shm, or the other one failed",
        "look for the first failure; give containers of one node one IPC namespace, or set NCCL_HOSTID apart",
    ),
    "duplicate_gpu": _fail(
        "two ranks use the same GPU", "use LOCAL_RANK for the device, one process per GPU; check CUDA_VISIBLE_DEVICES"
    ),
    "nccl_version_mismatch": _fail(
        "ranks run different NCCL builds, or settings that make their messages differ",
        "use one image and one environment for all ranks",
    ),
    "bootstrap_mismatch": _fail(
        "processes that do not belong together met while starting",
        "check ranks and world size of every process, and end processes that an earlier run left",
    ),
    "rendezvous_timeout": _fail(
        "a rank waited in vain for the address of the first one",
        "find why rank 0 did not come so far; check that all ranks enter the same collective",
    ),
    "collective_mismatch": _fail(
        "ranks sent other sizes than their peers expected",
        "check that all ranks call the same collectives in the same order, with the same sizes",
    ),
    "bootstrap_no_interface": _fail(
        "no usable network interface for the bootstrap", "correct NCCL_SOCKET_IFNAME or NCCL_COMM_ID"
    ),
    "no_interface_in_subnet": _fail(
        "no interface in the subnet of the peer", "correct NCCL_SOCKET_IFNAME on this host; check routes"
    ),
    "socket_connect_failed": _fail(
        "a peer could not be reached by TCP", "check the interface, firewall and route; then whether the peer runs"
    ),
    "connection_closed_by_peer": _info(
        "a peer closed its connection: follows from a failure elsewhere", "look for the rank that failed first"
    ),
    "mnnvl_not_working": _fail(
        "multi-node NVLink is present and does not work", "check IMEX: nvidia-imex-ctl -N, and the IMEX channel device"
    ),
    "nvls_bind_failed": _fail(
        "NVLink SHARP (NVLS) memory could not be set up",
        "check the fabric manager (nvidia-smi: Fabric State Completed)",
    ),
    "no_transport_found": _fail(
        "NCCL found no transport between two ranks", "allow P2P, SHM or a network again; see the disabled ones"
    ),
    "cuda_memory_not_shared": _fail(
        "a GPU could not take over the memory of another (cuMemImportFromShareableHandle)",
        "between nodes check IMEX (nvidia-imex-ctl -N) and its channel device in every container; within a node let "
        "all ranks see each other's processes and sockets, or set NCCL_CUMEM_ENABLE=0",
    ),
    "cuda_failure": _fail("a CUDA call failed inside NCCL", "read the CUDA error; often memory, device or driver"),
    "fabric_manager_not_ready": _fail(
        "CUDA is not ready (802): on NVSwitch systems the fabric manager is not running",
        "systemctl status nvidia-fabricmanager; its version must be the driver's",
    ),
    "driver_mismatch": _fail(
        "the GPU driver's libraries do not fit: NVML failed, or the driver is too old for this CUDA",
        "run nvidia-smi in the container; after a driver update restart the host",
    ),
    "gpu_xid": _fail(
        "the GPU driver reported that a GPU failed (Xid)", "look the number up in NVIDIA's list of Xid errors"
    ),
    "call_failed": _end("an NCCL call failed, and the log names no cause", "collect the logs of all ranks"),
    "watchdog_timeout": _end(
        "a collective did not finish within its group's timeout", "find the rank that did not enter it"
    ),
    "watchdog_hung": _end(
        "PyTorch's watchdog itself stood still: a CUDA call hangs, or a thread holds Python's lock (GIL)",
        "py-spy dump --native --pid of that rank, and the kernel's log for an Xid",
    ),
    # --- how the job ended
    "process_crashed": _end(
        "a process crashed: segmentation fault, bus error",
        "read the stack above the line; a bus error is often a full /dev/shm",
    ),
    "process_aborted": _end("a process ended itself (abort)", "read the error above the line"),
    "process_killed": _end(
        "a process was killed (SIGKILL)",
        "look in the kernel's log and the scheduler for who killed it: most often memory",
    ),
    "host_out_of_memory": _end(
        "the host, or the job's cgroup, ran out of memory: a process was killed",
        "raise the memory of the job or pod, or lower what data loading and checkpoints take",
    ),
    "gpu_out_of_memory": _end(
        "a GPU ran out of memory", "lower the micro-batch or shard further; topoflight recommend forecasts what fits"
    ),
    "cuda_error": _end(
        "a CUDA or HIP call of the program failed",
        "read the kernel's log for an Xid; CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
    "time_limit_reached": _end("the job reached its time limit and was ended", "ask for more time, or save and resume"),
    "job_preempted": _end("the job was preempted or evicted", "resume it from its last checkpoint"),
    "node_failed": _end("a node of the job failed", "look at that node; resume without it"),
    "job_cancelled": _end("the job was cancelled", "ask who cancelled it, and why"),
    "job_stopped": _end(
        "a process was told to end (SIGTERM, SIGINT)", "look for what failed first, or for who stopped the job"
    ),
    "job_failed": _end("the job ended with an error", "read the first error of the first rank that failed"),
    "python_traceback": _end("a Python program ended with an exception", "read the last line of the traceback"),
    "wrong_results": _end(
        "nccl-tests found wrong data",
        "do not use this node or link until it is found: run it on pairs of GPUs and nodes",
    ),
    # --- NCCL's own diagnostics (2.31 on)
    "diag_p2p_failed": _fail(
        "NCCL's diagnostics: GPUs of a node could not read or write each other's memory as they should",
        "check the named pair: NVLink state, ACS and IOMMU, IPC between the containers",
    ),
    "diag_net_slow": _fail(
        "NCCL's diagnostics: a rank's network is more than 30 % below the median of all",
        "check the named rank's device: width of its PCIe link, cable, port, and who else uses it",
    ),
    "diag_net_failed": _warn(
        "NCCL's diagnostics: a check of the network failed", "run ib_write_bw between the two nodes by hand"
    ),
    "diag_ecc": _fail("NCCL's diagnostics: a GPU has ECC errors", "nvidia-smi -q -d ECC on that rank's node"),
    "diag_nvlink_down": _fail(
        "NCCL's diagnostics: links between GPUs are down or differ from rank to rank, or their switch failed",
        "nvidia-smi nvlink -s on that rank's node",
    ),
    "diag_mismatch": _warn(
        "NCCL's diagnostics: ranks differ in GPU, driver or NCCL environment", "give every rank the same"
    ),
    "diag_incomplete": _info("NCCL's diagnostics: a check could not be made", "read what is missing"),
    "fine_grained_memory_off": _warn(
        "RCCL misses HSA_FORCE_FINE_GRAIN_PCIE=1: peers across PCIe may be slow or hang",
        "set HSA_FORCE_FINE_GRAIN_PCIE=1, or take an RCCL built with uncached memory",
    ),
    "numa_balancing_enabled": _warn("automatic NUMA balancing is on", "sysctl kernel.numa_balancing=0"),
    "iommu_not_passthrough": _warn(
        "the IOMMU is not in pass-through mode", "boot with iommu=pt (on AMD hosts amd_iommu=on iommu=pt)"
    ),
    "benign_teardown_warnings": _info("warnings of NCCL's shutdown, not a fault", "nothing"),
    "other_warnings": _info("warnings without an entry here", "read them"),
}
