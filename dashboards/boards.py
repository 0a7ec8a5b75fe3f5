"""The three dashboards: Cluster, Node, Preflight and Flights. What a panel must tell is beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import bargauge, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus as query
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, prometheus

SOURCE = common.DataSourceRef(type_val="prometheus", uid="$datasource")
KINDS = {
    "stat": stat.Panel, "timeseries": timeseries.Panel, "table": table.Panel, "matrix": table.Panel,
    "timeline": statetimeline.Panel, "bars": bargauge.Panel,
}  # fmt: skip
GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One expression and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel, and what a test may ask of it."""

    title: str
    description: str
    kind: str
    unit: str
    targets: tuple[Target, ...]
    width: int = 8
    height: int = 8
    steps: tuple[tuple[float | None, str], ...] = ((None, BLUE),)  # colour from this value on
    words: dict[str, tuple[str, str]] = field(default_factory=dict)  # value: (text, colour)
    rows: str = ""  # matrix: label of the rows
    columns: str = ""  # matrix: label of the columns
    quiet: bool = False  # may show nothing on a healthy node
    shows: tuple[str, ...] = ()  # recorded sick machines that it must tell from a healthy one


def target(expr: str, legend: str = "") -> Target:
    """A target, shortly."""
    return Target(expr=expr, legend=legend)


def m(name: str, **matchers: str) -> str:
    """A metric of the chosen agents; a matcher is an operator and a value, such as status="=fail"."""
    said = [re.fullmatch(r"(=~|!~|!=|=)(.*)", text) for text in matchers.values()]
    more = [f'{label}{each[1]}"{each[2]}"' for label, each in zip(matchers, said, strict=True) if each]
    inner = ", ".join(('job=~"$job"', 'instance=~"$instance"', *more))
    return f"{name}{{{inner}}}"


def board(uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> str:
    """The dashboard's JSON."""
    made = (
        build.Dashboard(title).uid(uid).description(description).tags(["topoflight"]).readonly()
        .time("now-6h", "now").timezone("browser").refresh("1m").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    )  # fmt: skip
    for variable in _variables():
        made.with_variable(variable)
    made.annotation(_marks("Findings", ORANGE, "topoflight_finding_since_seconds", "code", "severity"))
    made.annotation(_marks("Changes", BLUE, "topoflight_change_timestamp_seconds", "kind", "kind", " changed"))
    made.link(
        build.DashboardLink("Topoflight").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["topoflight"])
        .as_dropdown(True).include_vars(True).keep_time(True).icon("external link").tooltip("").url("")
    )  # fmt: skip
    number = 1
    for name, panels in rows:
        made.with_row(build.Row(name).id(number))
        number += 1
        for panel in panels:
            made.with_panel(_panel(panel).id(number))
            number += 1
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1, sort_keys=True) + "\n"


def _marks(name: str, colour: str, metric: str, title: str, tag: str, more: str = "") -> build.AnnotationQuery:
    """A mark at the time that each value of the metric is: named by one label, told and tagged by another."""
    labels = ", ".join(dict.fromkeys(("node", "instance", title, tag)))
    return (
        build.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
        .expr(f"max by ({labels}) ({m(metric)}) * 1000").use_value_for_time("on").step("60s")
        .title_format(f"{{{{{title}}}}}").tag_keys(tag)
        .text_format(f"{{{{node}}}} {{{{instance}}}}: {{{{{tag}}}}}{more}")
    )  # fmt: skip


def _variables() -> list[Any]:
    everything = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
    first = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    found: list[Any] = [first]
    for name, text in (
        ("job", "label_values(topoflight_build_info, job)"),
        ("instance", 'label_values(topoflight_build_info{job=~"$job"}, instance)'),
    ):
        found.append(
            build.QueryVariable(name).label(name).datasource(SOURCE).query({"query": text, "refId": name})
            .definition(text).multi(True).include_all(True).all_value(".+").current(everything)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        )  # fmt: skip
    return found


def _panel(panel: Panel) -> Any:
    made = KINDS[panel.kind]().title(panel.title).description(panel.description).datasource(SOURCE)
    made.unit(panel.unit).span(panel.width).height(panel.height)
    steps = [dashboard.Threshold(value=value, color=color) for value, color in panel.steps]
    made.thresholds(build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.words:
        made.mappings([_mapping(panel.words)])
    for place, one in enumerate(panel.targets):
        made.with_target(_target(panel, one, "ABCDEFGH"[place]))
    if panel.kind in ("table", "matrix"):
        _as_table(made, panel)
    elif panel.kind == "timeseries":
        made.min(0).line_width(1).fill_opacity(8).legend(
            common_builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM).calcs(["lastNotNull"])
        )  # fmt: skip
    elif panel.kind == "stat":
        made.color_mode(common.BigValueColorMode.BACKGROUND).graph_mode(common.BigValueGraphMode.NONE)
    if panel.kind in ("timeline", "stat", "bars"):
        made.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
    return made


def _mapping(words: dict[str, tuple[str, str]]) -> dashboard.ValueMap:
    return dashboard.ValueMap(
        options={
            value: dashboard.ValueMappingResult(text=text, color=color, index=place)
            for place, (value, (text, color)) in enumerate(words.items())
        }
    )


def _target(panel: Panel, one: Target, letter: str) -> Any:
    made = query.Dataquery().expr(one.expr).ref_id(letter).datasource(SOURCE)
    if panel.kind in ("table", "matrix", "stat", "bars"):
        made.instant()
    else:
        made.range()
    if panel.kind in ("table", "matrix"):
        return made.format(prometheus.PromQueryFormat.TABLE)
    return made.legend_format(one.legend or "{{instance}}")


def _as_table(made: Any, panel: Panel) -> None:
    """A table; a matrix has one row and column per label value and its cells in the colour of their value."""
    if panel.kind == "matrix":
        options = {"rowField": panel.rows, "columnField": panel.columns, "valueField": "Value"}
        made.with_transformation(dashboard.DataTransformerConfig(id_val="groupingToMatrix", options=options))
        made.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        made.cell_options(common.TableColoredBackgroundCellOptions())
        made.align(common.FieldTextAlignment.CENTER)
        return
    hidden: dict[str, bool] = {"Time": True, "__name__": True, "job": True}
    if len(panel.targets) == 1 and "_info" in panel.targets[0].expr:
        hidden["Value"] = True
    options = {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}
    made.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=options))


LARGEST = "=~[0-9]{7,}"  # from 1 MB on: below, latency and not the wire decides
GATE = {"0": ("pass", GREEN), "1": ("warn", YELLOW), "2": ("unknown", BLUE), "3": ("fail", RED)}
# NCCL's order of paths, as topoflight_gpu_link_distance numbers it
PATHS = {
    "0": ("LOC", BLUE), "1": ("NVL", GREEN), "2": ("NVB", "light-green"), "3": ("C2C", "light-green"),
    "4": ("PIX", "semi-dark-green"), "5": ("PXB", "dark-green"), "6": ("P2C", "dark-green"), "7": ("PXN", YELLOW),
    "8": ("PHB", ORANGE), "9": ("SYS", RED), "10": ("NET", "dark-red"), "11": ("DIS", "dark-red"),
}  # fmt: skip
GOOD_IS_MORE = ((None, RED), (0.8, YELLOW), (0.88, GREEN))  # ratios: docs/busbw.md
ANY_IS_BAD = ((None, GREEN), (1.0, RED))
NO_PEERMEM, MEMLOCK, HOT, NO_RDMA = (
    "sick-h100-no-peermem", "sick-h100-memlock-64KiB", "sick-h100-thermal", "sick-h100-rdma-off",
)  # fmt: skip
DEAD_HCA, NVLINK, LOST, NARROW = (
    "sick-h100-dead-hca", "sick-h100-nvlink-missing", "sick-h100-gpu-lost", "sick-l40s-x4",
)  # fmt: skip


def _gate(by: str) -> str:
    """0 pass, 1 warn, 2 unknown, 3 fail."""
    status = "topoflight_gate_status"
    parts = (("warn", 1), ("unknown", 2), ("fail", 3))
    return " + ".join(f"max by ({by}) ({m(status, status='=' + word)} * {n})" for word, n in parts)


FINDINGS = target(
    f"sum by (node, instance, code, severity) ({m('topoflight_findings', severity='=~warn|fail')})",
)
GATE_HISTORY = Panel(
    title="Gate",
    description="What the gate says of each node over time: pass, warn, unknown or fail.",
    kind="timeline", unit="none", width=24, words=GATE, steps=((None, GREEN), (1, YELLOW), (2, BLUE), (3, RED)),
    targets=(target(_gate("instance")),), shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, HOT, DEAD_HCA, NVLINK, LOST),
)  # fmt: skip

CLUSTER = (
    ("What is wrong now", (
        Panel(title="What is wrong", description="Findings that warn or fail; `topoflight explain CODE` says what "
              "mends them.", kind="table", unit="short", width=16, height=9, quiet=True, targets=(FINDINGS,),
              shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, HOT, DEAD_HCA, NVLINK, LOST, NARROW)),
        Panel(title="Nodes that fail the gate", description="Nodes with at least one failed check.", kind="stat",
              unit="short", width=4, height=9, steps=ANY_IS_BAD,
              targets=(target(f"sum({m('topoflight_gate_status', status='=fail')})", "failed"),),
              shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, DEAD_HCA, NVLINK, LOST)),
        Panel(title="Agents that do not answer", description="Targets that the last scrape did not reach.",
              kind="stat", unit="short", width=4, height=9, steps=ANY_IS_BAD,
              targets=(target(f"sum({m('up')} == bool 0)", "silent"),)),
    )),
    ("Readiness", (
        Panel(title="Nodes", description="Hosts that agents report about.", kind="stat", unit="short", width=6,
              height=4, targets=(target(f"sum({m('topoflight_hosts')})", "nodes"),)),
        Panel(title="GPUDirect RDMA possible", description="Share of nodes with RDMA whose modules and ports would "
              "allow GPUDirect RDMA.", kind="stat", unit="percentunit", width=6, height=4,
              steps=((None, RED), (1.0, GREEN)),
              targets=(target(f"avg({m('topoflight_gdrdma_possible')})", "possible"),), shows=(NO_PEERMEM,)),
        Panel(title="Slow ranks", description="Ranks that others wait for, over the last benchmark of every node.",
              kind="stat", unit="short", width=6, height=4, steps=ANY_IS_BAD,
              targets=(target(f"sum({m('topoflight_bench_slow_ranks')})", "slow ranks"),), shows=(HOT,)),
        Panel(title="Oldest fact", description="Age of the oldest fact that a probe read; of a recording it is the "
              "recording's.", kind="stat", unit="s", width=6, height=4, steps=((None, GREEN), (600, RED)),
              targets=(target(f"max(time() - {m('topoflight_fact_timestamp_seconds', fact='!~bench|flight')})",
                              "oldest"),)),
        GATE_HISTORY,
    )),
    ("What the wires do", (
        Panel(title="Measured over expected bus bandwidth", description="Last benchmark of each node against what "
              "its links allow; published results of 1 GiB and more lie at 0.88 to 0.98.", kind="timeseries",
              unit="percentunit", width=12, steps=GOOD_IS_MORE,
              targets=(target(
                  f"max by (instance, op) ({m('topoflight_bench_busbw_bytes_per_second', size_bytes=LARGEST)} / "
                  f"{m('topoflight_bench_expected_busbw_bytes_per_second', size_bytes=LARGEST)})",
                  "{{instance}} {{op}}"),),
              shows=(NO_PEERMEM, HOT)),
        Panel(title="Bus bandwidth", description="Best bus bandwidth of the last benchmark, by operation.",
              kind="timeseries", unit="Bps", width=12,
              targets=(target(f"max by (instance, op) ({m('topoflight_bench_busbw_bytes_per_second')})",
                              "{{instance}} {{op}}"),), shows=(NO_PEERMEM, HOT)),
        Panel(title="Channels with GPUDirect RDMA", description="Share of the channels between nodes in the last "
              "log, for each direction.", kind="timeseries", unit="percentunit", width=8,
              targets=(target(f"min by (instance, direction) ({m('topoflight_gdrdma_channels_ratio')})",
                              "{{instance}} {{direction}}"),), shows=(NO_PEERMEM,)),
        Panel(title="Transports", description="Channel lines of the last logs by transport.", kind="bars",
              unit="short", width=8, targets=(target(f"sum by (transport) ({m('topoflight_transport_channels')})",
                                                     "{{transport}}"),), shows=(NO_PEERMEM,)),
        Panel(title="Problems in the last logs", description="What `topoflight evidence` named, by code.",
              kind="table", unit="short", width=8, quiet=True,
              targets=(target(f"sum by (instance, code, severity) ({m('topoflight_log_problems')})"),),
              shows=(NO_PEERMEM,)),
        Panel(title="How late slow ranks are", description="Median time that a slow rank arrives after the others.",
              kind="timeseries", unit="s", width=12, quiet=True,
              targets=(target(f"max by (instance, rank) ({m('topoflight_bench_rank_late_seconds')})",
                              "{{instance}} rank {{rank}}"),), shows=(HOT,)),
        Panel(title="Slowest nodes", description="The ten nodes that reach least of what their links allow.",
              kind="bars", unit="percentunit", width=12, steps=GOOD_IS_MORE, shows=(NO_PEERMEM, HOT),
              targets=(target(
                  "bottomk(10, min by (instance) ("
                  f"{m('topoflight_bench_busbw_bytes_per_second', size_bytes=LARGEST)} / "
                  f"{m('topoflight_bench_expected_busbw_bytes_per_second', size_bytes=LARGEST)}))"),)),
        Panel(title="GPUs outside the NVSwitch fabric", description="GPUs that the fabric manager has not taken in: "
              "CUDA does not start on them.", kind="stat", unit="short", width=12, steps=ANY_IS_BAD,
              targets=(target(f"sum by (instance) ({m('topoflight_gpu_fabric_ready')} == bool 0)"),)),
        Panel(title="Latency", description="Latency (alpha) of the last benchmark, by operation.", kind="timeseries",
              unit="s", width=12,
              targets=(target(f"max by (instance, op) ({m('topoflight_bench_latency_seconds')})",
                              "{{instance}} {{op}}"),)),
    )),
    ("Knowledge", (
        Panel(title="Age of facts", description="Age of what each probe read, and of the last benchmark and flight.",
              kind="timeseries", unit="s", width=12,
              targets=(target(f"max by (instance, fact) (time() - {m('topoflight_fact_timestamp_seconds')})",
                              "{{instance}} {{fact}}"),)),
        Panel(title="Failing probes", description="Probes that ended with an error: what they read is unknown.",
              kind="timeseries", unit="short", width=12,
              targets=(target(f"sum by (instance) ({m('topoflight_probe_success')} == bool 0)"),)),
    )),
)  # fmt: skip

NODE = (
    ("Findings", (
        Panel(title="What is wrong", description="Findings that warn or fail; `topoflight explain CODE` says what "
              "mends them.", kind="table", unit="short", width=16, quiet=True, targets=(FINDINGS,),
              shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, HOT, DEAD_HCA, NVLINK, LOST, NARROW)),
        Panel(title="Checks", description="Checks of the last scan by their outcome.", kind="bars", unit="short",
              targets=(target(f"sum by (status) ({m('topoflight_checks')})", "{{status}}"),),
              shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, HOT, DEAD_HCA, NVLINK, LOST)),
    )),
    ("Links", (
        Panel(title="GPU link matrix", description="Path between two GPUs in NCCL's words: NVL is NVLink, PIX one "
              "PCIe switch, PHB the CPU, SYS the other socket. Choose one instance.", kind="matrix", unit="none",
              width=12, height=10, rows="gpu", columns="peer_gpu", words=PATHS,
              targets=(target(f"max by (gpu, peer_gpu) ({m('topoflight_gpu_link_distance')})"),), shows=(LOST,)),
        Panel(title="NVLinks between GPUs", description="Number of NVLinks; one lower number in a row of equal ones "
              "is a link that is down.", kind="matrix", unit="short", width=12, height=10, rows="gpu",
              columns="peer_gpu", steps=((None, RED), (1, YELLOW), (4, GREEN)),
              targets=(target(f"min by (gpu, peer_gpu) ({m('topoflight_gpu_link_nvlinks')})"),),
              shows=(NVLINK, LOST)),
        Panel(title="GPU to NIC", description="Path from each GPU to each NIC: PIX and PXB allow GPUDirect RDMA by "
              "themselves.", kind="matrix", unit="none", width=12, height=10, rows="gpu", columns="device",
              words=PATHS, targets=(target(f"max by (gpu, device) ({m('topoflight_gpu_nic_distance')})"),),
              shows=(NO_RDMA,)),
        Panel(title="Nearest NIC", description="The NIC that each GPU is nearest to, and the path there.",
              kind="table", unit="short", width=12, height=10,
              targets=(target(f"max by (instance, gpu, device, path) "
                              f"({m('topoflight_gpu_nic_info', nearest='=true')})"),), shows=(DEAD_HCA,)),
        Panel(title="NVLinks up", description="Active NVLinks of each GPU: all twins should have as many.",
              kind="timeseries", unit="short", width=8,
              targets=(target(f"min by (instance, gpu) ({m('topoflight_gpu_nvlinks_active')})",
                              "{{instance}} GPU{{gpu}}"),), shows=(NVLINK, LOST)),
        Panel(title="NVLink errors", description="Rate of NVLink errors: a steady rate is a link to look at.",
              kind="timeseries", unit="ops", width=8, quiet=True,
              targets=(target(f"sum by (instance, gpu) "
                              f"(rate({m('topoflight_gpu_nvlink_errors_total')}[$__rate_interval]))",
                              "{{instance}} GPU{{gpu}}"),)),
        Panel(title="PCIe width in use", description="Lanes in use over lanes that device and slot could use.",
              kind="timeseries", unit="percentunit", width=8,
              targets=(target(f"min by (instance, pci_bus_id) ({m('topoflight_pci_link_width_ratio')})",
                              "{{instance}} {{pci_bus_id}}"),), shows=(NARROW,)),
    )),
    ("Networks", (
        Panel(title="RDMA ports", description="Port, link layer and interface of every RDMA device.", kind="table",
              unit="short", width=12,
              targets=(target(f"max by (instance, device, port, link_layer, netdev, kind) "
                              f"({m('topoflight_rdma_port_info')})"),), shows=(NO_RDMA,)),
        Panel(title="Interfaces", description="Role of each interface, and what it stands on.", kind="table",
              unit="short", width=12,
              targets=(target(f"max by (instance, device, role, kind, parent, rdma_device, network) "
                              f"({m('topoflight_interfaces_role_info')})"),)),
        Panel(title="Packet size of RDMA ports", description="Payload of a packet: 4096 is the most.",
              kind="timeseries", unit="bytes", width=8, quiet=True,  # unknown on InfiniBand
              targets=(target(f"min by (instance, device, port) ({m('topoflight_rdma_port_mtu_bytes')})",
                              "{{instance}} {{device}}:{{port}}"),)),
        Panel(title="GID that NCCL takes", description="Index in the GID table; it should be the RoCE v2 one.",
              kind="timeseries", unit="none", width=8, quiet=True,  # RoCE only
              targets=(target(f"max by (instance, device) ({m('topoflight_rdma_port_nccl_gid_index')})",
                              "{{instance}} {{device}} NCCL"),
                       target(f"max by (instance, device) ({m('topoflight_rdma_port_rocev2_gid_index')})",
                              "{{instance}} {{device}} RoCE v2"))),
        Panel(title="Interface NCCL takes", description="With NCCL_SOCKET_IFNAME unset.", kind="table", unit="short",
              width=8, targets=(target(f"max by (instance, device) ({m('topoflight_interfaces_nccl_choice_info')})"),)),
    )),
    ("Limits", (
        Panel(title="Memlock", description="RLIMIT_MEMLOCK of the agent; unlimited is right.", kind="stat",
              unit="bytes", width=8, height=6, steps=((None, RED), (8388609, GREEN)),
              targets=(target(f"min by (bound) ({m('topoflight_limits_memlock_bytes')})", "{{bound}}"),),
              shows=(MEMLOCK,)),
        Panel(title="Shared memory", description="Size and free space of /dev/shm.", kind="timeseries", unit="bytes",
              width=8, height=6,
              targets=(target(f"min by (instance) ({m('topoflight_limits_shm_size_bytes')})", "{{instance}} size"),
                       target(f"min by (instance) ({m('topoflight_limits_shm_free_bytes')})", "{{instance}} free"))),
        Panel(title="GPUDirect RDMA modules", description="Whether a peer memory module is loaded, and whether "
              "DMA-BUF is possible.", kind="stat", unit="none", width=8, height=6,
              words={"0": ("no", RED), "1": ("yes", GREEN)},
              targets=(target(f"min by (instance) ({m('topoflight_pci_peermem_loaded')})", "peermem"),
                       target(f"min by (instance) ({m('topoflight_pci_dmabuf_possible')})", "DMA-BUF")),
              shows=(NO_PEERMEM,)),
    )),
    ("Heat and power", (
        Panel(title="What holds the clocks down", description="Reasons that are active, by GPU.", kind="timeline",
              unit="none", width=16, words={"0": ("no", GREEN), "1": ("yes", RED)},
              targets=(target(f"max by (instance, gpu, reason) "
                              f"({m('topoflight_gpu_throttling', reason='=~.*thermal|hw_.*')})",
                              "{{instance}} GPU{{gpu}} {{reason}}"),), shows=(HOT,)),
        Panel(title="Power limit over the board's own", description="Below 1 somebody has set a lower limit.",
              kind="timeseries", unit="percentunit", width=8,
              targets=(target(f"min by (instance, gpu) ({m('topoflight_gpu_power_limit_watts')} / "
                              f"{m('topoflight_gpu_power_limit_default_watts')})", "{{instance}} GPU{{gpu}}"),),
              shows=(HOT,)),
        Panel(title="GPUs that answer", description="0 where the driver has lost a GPU.", kind="stat", unit="none",
              width=12, height=6, words={"0": ("lost", RED), "1": ("up", GREEN)},
              targets=(target(f"min by (gpu) ({m('topoflight_gpu_up')})", "GPU{{gpu}}"),), shows=(LOST,)),
        Panel(title="Duration of probes", description="How long each probe took in the last scan.",
              kind="timeseries", unit="s", width=12, height=6,
              targets=(target(f"max by (instance, probe) ({m('topoflight_probe_duration_seconds')})",
                              "{{instance}} {{probe}}"),)),
    )),
)  # fmt: skip

FORECAST = tuple(
    target(f"max by (instance) ({m('topoflight_flight_forecast_step_seconds', bound='=' + bound)})",
           "{{instance}} forecast, " + bound)
    for bound in ("low", "mid", "high")
)  # fmt: skip
FORECAST_MEMORY = tuple(
    target(f"max by (instance) ({m('topoflight_flight_forecast_memory_bytes', bound='=' + bound)})",
           "{{instance}} forecast, " + bound)
    for bound in ("low", "mid", "high")
)  # fmt: skip
WITHIN = {"0": ("outside", RED), "1": ("inside", GREEN)}
FLIGHTS = (
    ("Preflight", (
        GATE_HISTORY,
        Panel(title="Findings by severity", description="How many checks did not pass, over time.",
              kind="timeseries", unit="short", width=12, quiet=True,
              targets=(target(f"sum by (severity) ({m('topoflight_findings')})", "{{severity}}"),),
              shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, HOT, DEAD_HCA, NVLINK, LOST)),
        Panel(title="Checks by outcome", description="Passed, failed and unknown checks; unknown is not passed.",
              kind="timeseries", unit="short", width=12,
              targets=(target(f"sum by (status) ({m('topoflight_checks')})", "{{status}}"),),
              shows=(NO_PEERMEM, NO_RDMA, MEMLOCK, HOT, DEAD_HCA, NVLINK, LOST)),
    )),
    ("Forecast against flight", (
        Panel(title="Last flight", description="Whether the last fine-tune ended complete.", kind="stat",
              unit="none", width=6, height=5, words={"0": ("failed", RED), "1": ("complete", GREEN)},
              targets=(target(f"min by (instance) ({m('topoflight_flight_success')})"),)),
        Panel(title="Inside the forecast", description="Whether step time and memory lie inside their interval.",
              kind="stat", unit="none", width=9, height=5, words=WITHIN,
              targets=(target(f"min by (instance, quantity) ({m('topoflight_flight_within_forecast')})",
                              "{{instance}} {{quantity}}"),), shows=(HOT,)),
        Panel(title="Flights by outcome", description="How the flights that agents remember ended.", kind="bars",
              unit="short", width=9, height=5,
              targets=(target(f"sum by (status) ({m('topoflight_flights')})", "{{status}}"),)),
        Panel(title="Step time", description="Median step time of the last flight beside its forecast.",
              kind="timeseries", unit="s", width=12, shows=(HOT,),
              targets=(target(f"max by (instance) ({m('topoflight_flight_step_seconds')})", "{{instance}} measured"),
                       *FORECAST)),
        Panel(title="Memory", description="Peak memory of the fullest rank of the last flight beside its forecast.",
              kind="timeseries", unit="bytes", width=12,
              targets=(target(f"max by (instance) ({m('topoflight_flight_memory_bytes')})", "{{instance}} measured"),
                       *FORECAST_MEMORY)),
    )),
    ("Inside a step", (
        Panel(title="Time in collectives", description="Of the profiled steps, by collective.", kind="bars",
              unit="s", width=8,
              targets=(target(f"sum by (collective) ({m('topoflight_flight_communication_seconds')})",
                              "{{collective}}"),)),
        Panel(title="Share of communication", description="Share of the profiled steps in collectives, and the part "
              "that no computing hides.", kind="timeseries", unit="percentunit", width=8,
              targets=(target(f"max by (instance) ({m('topoflight_flight_communication_ratio')})", "{{instance}} all"),
                       target(f"max by (instance) ({m('topoflight_flight_exposed_communication_ratio')})",
                              "{{instance}} exposed")), shows=(HOT,)),
        Panel(title="Tokens per second", description="Of the last flight, padding not counted.", kind="timeseries",
              unit="wps", width=8,
              targets=(target(f"max by (instance) ({m('topoflight_flight_tokens_per_second')})"),), shows=(HOT,)),
        Panel(title="Model FLOPs utilisation", description="Of the last flight, where the device's peak is known.",
              kind="timeseries", unit="percentunit", width=8, quiet=True,
              targets=(target(f"max by (instance) ({m('topoflight_flight_mfu_ratio')})"),)),
        Panel(title="Loss", description="At the first and the last step of the last flight: it must fall.",
              kind="timeseries", unit="none", width=8,
              targets=(target(f"max by (instance, phase) ({m('topoflight_flight_loss')})",
                              "{{instance}} {{phase}}"),)),
        Panel(title="Steps", description="Steps of the last flight.", kind="timeseries", unit="short", width=8,
              targets=(target(f"max by (instance) ({m('topoflight_flight_steps')})"),)),
    )),
)  # fmt: skip

BOARDS = {
    "cluster": ("topoflight-cluster", "Topoflight / Cluster", "Is the fabric ready, and which node is not.", CLUSTER),
    "node": ("topoflight-node", "Topoflight / Node", "Links, networks, limits, heat and power of a node.", NODE),
    "flights": ("topoflight-flights", "Topoflight / Preflight and Flights",
                "What the gate said over time, and how flights compare with their forecast.", FLIGHTS),
}  # fmt: skip


def made() -> dict[str, str]:
    """File name below dashboards/ and its JSON."""
    return {f"{name}.json": board(*parts) for name, parts in BOARDS.items()}


def panels() -> list[tuple[str, Panel]]:
    """Every panel with its dashboard."""
    return [(name, panel) for name, (*_, rows) in BOARDS.items() for _, row in rows for panel in row]
