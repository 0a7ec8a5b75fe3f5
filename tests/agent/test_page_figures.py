"""The page's figures: true lengths, words for those who do not see them, and no text of a host that becomes markup."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rigs.tables import each_row

from agent.checks.view import View, look
from agent.http.questions import question
from agent.jobs.preflight import Report
from agent.pages import charts
from agent.pages import nodes as page_nodes
from agent.pages import render as pages
from agent.pages.runs import Shown, by_network, not_drawn, shown, side_by_side
from agent.terminal.findings import findings
from contracts.interval import Interval
from contracts.run_record import record_of
from planner.advice import Part
from probes.host.recording import load
from probes.scan import scan
from topology.build import build

MACHINES = sorted((Path(__file__).parent.parent / "machines").glob("*.json"))
HOSTILE = "<script>alert('&')</script>\"x"
PARTS = (Part(name="gemm", value=3.0, detail="flops"), Part(name="gather", value=1.0, detail=HOSTILE))


def widths(svg: str, kind: str) -> list[float]:
    return [float(w) for w in re.findall(rf'class="{kind}"[^>]*? width="([0-9.]+)"', svg)]


@each_row("path", MACHINES, ids=lambda path: path.stem)
def test_every_device_is_drawn_and_the_drawing_is_well_formed(path: Path) -> None:
    """Each GPU and NIC once, and a sentence that says the same."""
    snapshot = scan(load(path))
    node = build(snapshot)
    drawn = pages.picture(node, snapshot=snapshot, checks=look((snapshot,)).checks)
    root = ElementTree.fromstring(drawn)  # noqa: S314 - our own output
    classes = [element.get("class", "").split() for element in root.iter("rect")]
    assert sum("d-gpu" in names for names in classes) == len(node.gpus)
    assert sum("d-nic" in names for names in classes) == len(node.nics)
    assert all(near.gpu in root.get("aria-label", "") for near in node.nearest_nic)


def test_missing_nics_and_sick_devices_stand_out() -> None:
    """Ten NICs without RDMA are drawn as gaps; a lost GPU and a GPU short of NVLinks carry their marks."""
    by_name = {path.stem: path for path in MACHINES}
    drawn = {}
    for name in ("sick-h100-rdma-off", "sick-h100-gpu-lost", "sick-h100-nvlink-missing", "hgx-h100-8xH100-8hca"):
        snapshot = scan(load(by_name[name]))
        drawn[name] = pages.picture(build(snapshot), snapshot=snapshot, checks=look((snapshot,)).checks)
    assert drawn["sick-h100-rdma-off"].count('class="d-ghost d-fail"') == 10
    assert "✗ GPU5" in drawn["sick-h100-gpu-lost"]
    assert "! NV16" in drawn["sick-h100-nvlink-missing"]
    assert "d-fail" not in drawn["hgx-h100-8xH100-8hca"]


def texts(drawn: str) -> list[tuple[str, str]]:
    """Class and words of every text of a drawing."""
    root = ElementTree.fromstring(drawn)  # noqa: S314 - our own output
    return [(text.get("class", ""), text.text or "") for text in root.iter("text")]


def test_the_label_of_a_gpu_is_the_link_that_it_runs_at() -> None:
    """Four lanes in a slot of sixteen: said at that GPU, marked, with both bandwidths behind it; the others are x16."""
    snapshot = scan(load(MACHINES[0].with_name("sick-l40s-x4.json")))
    drawn = pages.picture(build(snapshot), snapshot=snapshot, checks=look((snapshot,)).checks)
    links = [(kind, words) for kind, words in texts(drawn) if "x16" in words]
    assert sorted(links) == [("d-tiny", "Gen4 x16")] * 3 + [("d-tiny d-warn", "! Gen4 x4 of x16")]
    assert "GPU2: Gen4 x4 of x16, 6 GB/s each way as it runs, 24 GB/s planned each way" in drawn


@each_row("path", MACHINES, ids=lambda path: path.stem)
def test_no_line_of_a_drawing_is_red_where_nothing_is_wrong(path: Path) -> None:
    """The link between two CPUs is as sound as the CPUs: it has their colour, and is not dashed as what is missing."""
    drawn = pages.picture(build(scan(load(path))))
    root = ElementTree.fromstring(drawn) if drawn else ElementTree.Element("svg")  # noqa: S314 - our own output
    kinds = [line.get("class", "") for line in root.iter("path")]
    assert "l-sys" not in kinds and "l-gone" not in kinds
    boxes = sum("d-frame" in (rect.get("class") or "") for rect in root.iter("rect"))
    assert kinds.count("l-cpus") == max(0, boxes - 1)


@each_row("name", ["aws-p4d-8xA100-4efa", "titan-rtx-2x-nv2"])
def test_lines_are_of_their_own_class_and_texts_inside(name: str) -> None:
    """A GPU's PCIe line has PCIe's colour though NVLink joins it too; no text ends beyond the drawing."""
    node = build(scan(load(MACHINES[0].with_name(f"{name}.json"))))
    root = ElementTree.fromstring(pages.picture(node))  # noqa: S314 - our own output
    space = float(root.attrib["viewBox"].split()[2])
    lines = [path.attrib for path in root.iter("path")]
    upright = [line for line in lines if "C" in line["d"]]  # of a device to its switch or to the CPU
    assert upright and all("l-nv" not in line["class"] for line in upright)
    for text in root.iter("text"):
        if text.attrib["text-anchor"] == "start":
            assert float(text.attrib["x"]) + 6 * len(text.text or "") < space, text.text
    shown = [text.text for text in root.iter("text") if re.fullmatch(r"GPU\d+", text.text or "")]
    places = {text.text: float(text.attrib["x"]) for text in root.iter("text")}
    pairs = [(f"GPU{n}", f"GPU{n + 1}") for n in range(0, len(shown), 2)]
    assert all(places[a] < places[b] for a, b in pairs)


def test_names_of_a_host_stay_text() -> None:
    """A hostname or device name can neither end the drawing nor start a script."""
    node = build(scan(load(MACHINES[0])))
    nics = tuple(replace(nic, name=HOSTILE + nic.name) for nic in node.nics)
    drawn = pages.picture(replace(node, hostname=HOSTILE, nics=nics))
    ElementTree.fromstring(drawn)  # noqa: S314 - our own output
    assert "<script" not in drawn


@each_row("name", ["sick-h100-rdma-off", "sick-h100-thermal", "hgx-h100-8xH100-8hca", "sick-l40s-x4"])
def test_the_banner_counts_checks_in_one_sentence(name: str) -> None:
    """One failed check on ten devices, two readings of one GPU in one box; no gap between words."""
    view = look((scan(load(MACHINES[0].with_name(f"{name}.json"))),))
    html = pages.node_page(view, None, "", trouble=None)
    (banner,) = re.findall(r'<p class="verdict.*?</p>', html)
    words = re.sub(r"<[^>]+>", "", banner)
    assert "  " not in words
    count = view.verdict.by_check
    assert (
        words
        == {
            "sick-h100-rdma-off": f"✗ FAIL 1 check failed, on 10 devices; 1 warning, {count['unknown']} unknown, ",
            "sick-h100-thermal": f"✗ FAIL 3 checks failed; 1 warning, {count['unknown']} unknown, ",
            "hgx-h100-8xH100-8hca": f"✓ pass healthy as far as seen; {count['unknown']} checks unknown, named below; ",
            "sick-l40s-x4": f"✗ FAIL 1 check failed; 1 warning, {count['unknown']} unknown, ",
        }[name]
        + f"{count['pass']} passed"
    )
    assert "not a pass" not in html
    opened = re.search(r'<details id="unknowns"( open)?>', html)
    assert opened and bool(opened[1]) == (view.verdict.word == "pass")  # "named below" is to be seen without a click
    boxes = re.findall(r'<li class="finding f-(?:fail|warn)">.*?</li>\n(?=<li class="finding|</ol>)', html, re.DOTALL)
    if name == "sick-h100-thermal":
        assert len(boxes) == 2
        for words in ("GPU6", "88 C", "slowed down to 1050", "gpu.thermal.hot", "gpu.thermal.throttling", "too hot"):
            assert words in boxes[1], words


def seen(*names: str) -> View:
    return look(tuple(scan(load(MACHINES[0].with_name(f"{name}.json"))) for name in names))


def test_a_node_is_not_drawn_with_the_faults_of_another() -> None:
    """Two nodes of one kind share every address: only the one whose NICs are gone shows them, in one report too."""
    view = seen("hgx-h100-8xH100-8hca", "sick-h100-rdma-off")
    healthy, sick = (
        pages.picture(node, snapshot=snapshot, checks=view.checks)
        for node, snapshot in zip(view.topologies, view.snapshots, strict=True)
    )
    assert "d-fail" not in healthy
    assert sick.count("d-ghost d-fail") == 10


def test_a_report_of_several_nodes_counts_each_check_once_and_names_the_nodes() -> None:
    """The banner and the lists below it agree; what two nodes share is told with the node's name on each line."""
    view = seen("l40s-4x-pcie", "sick-l40s-x4", "sick-h100-rdma-off")
    whole = Report(
        started_at_seconds=0.0, seconds=1.0, topoflight_version="0", snapshots=view.snapshots, checks=view.checks,
        topologies=view.topologies, verdict=view.verdict,
    )  # fmt: skip
    html = pages.report_page(whole)
    number = view.verdict.by_check
    assert view.verdict.why == "2 checks failed, on 2 nodes"
    assert f"<summary>{number['pass']} checks passed</summary>" in html
    assert f"<summary>{number['unknown']} checks unknown" in html
    for node in ("l40s-01", "l40s-sick-x4"):
        assert f"<li>{node}: GPU2 has no NIC on its own NUMA node" in html
    out = Console(file=io.StringIO(), width=200)
    findings(out, view.checks)
    assert f"{number['pass']} checks passed" in out.file.getvalue()  # type: ignore[attr-defined]
    assert "l40s-01: GPU2 has no NIC on its own NUMA node" in out.file.getvalue()  # type: ignore[attr-defined]


def test_one_lost_gpu_does_not_hide_where_the_others_nics_are() -> None:
    """Seven GPUs have their NIC at one switch; of the eighth it cannot be told."""
    view = seen("sick-h100-gpu-lost")
    shown = dict(page_nodes.glance(view.topologies[0], view.snapshots[0], None))
    assert shown["Nearest NIC"] == "PIX for 7 of 8 GPUs, undecidable for 1 of 8 GPUs"
    html = pages.node_page(view, None, "", trouble=None)
    assert "Nearest NIC of each GPU (undecidable for GPU5)" in html


def test_the_legend_stands_before_what_it_explains() -> None:
    """Seen with the drawing, and before the matrix, on the page and in the report."""
    view = look((scan(load(MACHINES[0].with_name("hgx-h100-8xH100-8hca.json"))),))
    html = pages.node_page(view, None, "", trouble=None)
    section = html[html.index('aria-labelledby="topology"') :]
    places = [section.index(word) for word in ('class="legend"', "<svg class=", 'class="matrix')]
    assert places == sorted(places)


def test_a_large_matrix_has_short_columns_and_no_name_is_lost() -> None:
    """More than a dozen devices: NIC numbers as nvidia-smi has them, each row names its device; few keep theirs."""
    for name, dense in (("hgx-h100-8xH100-8hca", True), ("r760xa-2xA40-bf3", False)):
        view = look((scan(load(MACHINES[0].with_name(f"{name}.json"))),))
        html = pages.node_page(view, None, "", trouble=None)
        head = re.search(r'<table class="matrix.*?</thead>', html, re.DOTALL)
        assert head
        assert (">NIC1<" in head[0]) == dense
        assert (">mlx5_1<" in head[0]) != dense
        assert all(nic.name in html[head.end() :] for nic in view.topologies[0].nics)


def test_stacked_parts_have_their_share_of_the_scale() -> None:
    """Four seconds on a scale of eight: half the bar; the limit's mark stands where it is."""
    names = charts.names_of([PARTS])
    bar = charts.stacked(PARTS, names, full=8.0, limit=6.0)
    assert widths(bar, "p0") == [375.0]
    assert widths(bar, "p1") == [125.0]
    assert 'class="limit" x="750.0"' in bar
    assert 'aria-label="gemm 75 %, gather 25 %"' in bar
    assert "<script" not in bar


def test_a_part_keeps_its_colour_between_layouts() -> None:
    """The second layout lacks the first's parts, and still has the same colour for the shared one."""
    names = charts.names_of([PARTS, PARTS[1:]])
    assert 'class="p1"' in charts.stacked(PARTS[1:], names, full=8.0)


def test_three_runs_of_one_job_are_three_bars() -> None:
    """5 h, 2 h 30 and 1 h 40 of one fine-tune, by network: lengths and factors are those of the numbers."""
    rows = [
        charts.Run(label=label, value=seconds, shown=f"{seconds:.0f} s")
        for label, seconds in (("default network", 18000.0), ("TCP, secondary", 9000.0), ("RDMA", 6000.0))
    ]
    figure = charts.runs("one job", rows)
    assert widths(figure, "p0") == [1000.0, 500.0, 333.3]
    assert "(3.00 x)" in figure
    assert "(1.50 x)" in figure


def shown_of(records: Iterable[dict[str, object]]) -> tuple[Shown, ...]:
    return shown(record_of(record) for record in records)


def record(transports: list[str], step: float, status: str = "complete", **environment: str) -> dict[str, object]:
    return {
        "status": status, "model": {"name": "m"}, "transports": transports, "measured": {"step_seconds": step},
        "environment": environment,
    }  # fmt: skip


def test_flights_are_compared_by_the_network_they_logged() -> None:
    """The newest complete one of each counts; device numbers do not make networks; one network is no comparison."""
    found = shown_of(
        [
            record(["P2P/CUMEM", "NET/IB/0/GDRDMA", "NET/IB/1/GDRDMA"], 1.0),
            record(["NET/Socket/0"], 3.0),
            record(["NET/Socket/0"], 9.0),
            record(["NET/IB/0"], 0.1, status="diverged"),
        ]
    )
    rdma, tcp = "RDMA (NET/IB/GDRDMA)", "TCP over the default network (NET/Socket)"
    assert [one.transport for one in found] == [rdma, tcp, tcp, "RDMA (NET/IB)"]
    figure = side_by_side(found)
    assert figure.count('scope="row"') == 2
    assert "(3.00 x)" in figure
    assert side_by_side(found[1:3]) == ""


def test_a_short_run_does_not_stand_for_its_network() -> None:
    """Two smoke runs of two steps, newer than the real ones, change no bar; each is named with the reason."""
    smoke = {"measured": {"step_seconds": 1.0, "counted_steps": 0}, "steps_done": 2}
    long = [record(["NET/Socket/0"], 3.35, NCCL_SOCKET_IFNAME=name) for name in ("eth0", "net1")]
    long[1]["measured"] = {"step_seconds": 0.45, "counted_steps": 20}
    found = shown_of([*({**one, **smoke} for one in long), *long])
    (bars,) = by_network(found)
    assert [run.value for run in bars.runs] == [3.35, 0.45]
    assert [told.partition(": ")[2] for told in not_drawn(found)] == [
        "0 of its 2 steps count beside warm-up and profiled ones, 3 are needed"
    ] * 2


def test_a_record_without_counted_steps_counts_what_is_left_of_its_steps() -> None:
    """As records of earlier releases have it: eight steps leave three, two leave none."""
    made = [record(["NET/Socket/0"], 1.0) | {"step_seconds": [1.0] * steps} for steps in (8, 2)]
    assert [one.record.counted_steps for one in shown_of(made)] == [3, 0]


def test_what_is_in_no_comparison_says_why() -> None:
    """A run that did not end, one without a transport, and a job that took one network only."""
    found = shown_of([record(["NET/IB/0"], 1.0, status="running"), record([], 1.0), record(["NET/Socket/0"], 1.0)])
    assert by_network(found) == ()
    told = "\n".join(not_drawn(found))
    assert "not complete but running" in told and "names no transport" in told and "took one network" in told


def test_the_interface_that_nccl_names_goes_before_the_one_that_was_asked_for() -> None:
    """By its own log; a record that holds none of it, or nonsense, has what was asked for."""
    asked = record(["NET/Socket/0"], 1.0, NCCL_SOCKET_IFNAME="net1")
    seen = [shown_of([{**asked, "nccl": {"interfaces": found}}])[0].transport for found in (["eth0"], [], None, [7])]
    assert seen == ["TCP over eth0 (NET/Socket)", *["TCP over net1 (NET/Socket)"] * 3]


def test_one_job_over_three_networks_is_three_bars_in_html_and_on_the_terminal() -> None:
    """TCP over the default network and over a named one are two networks; the factors are against the quickest."""
    found = shown_of(
        [
            record(["NET/IB/0/GDRDMA"], 1.0, NCCL_SOCKET_IFNAME="net1"),
            record(["NET/Socket/0"], 1.5, NCCL_SOCKET_IFNAME="net1"),
            record(["NET/Socket/0"], 3.0),
        ]
    )
    (bars,) = by_network(found)
    assert [(label, len(bar), shown) for label, bar, shown in charts.blocks(bars.runs, 12)] == [
        ("TCP over the default network (NET/Socket)", 12, "3 s a step (3.00 x)"),
        ("TCP over net1 (NET/Socket)", 6, "1.5 s a step (1.50 x)"),
        ("RDMA (NET/IB/GDRDMA)", 4, "1 s a step"),
    ]
    assert widths(side_by_side(found), "p0") == [1000.0, 500.0, 333.3]


def test_the_interface_that_gloo_took_counts_and_not_the_one_that_was_asked_for() -> None:
    """What was set is shown only of a record that does not say what was taken."""
    taken = ["gloo: TCP over net2 (10.0.0.1)", "gloo: TCP over net1 (fe80::1)", "gloo: TCP over net1 (10.0.1.1)"]
    unknown = ["gloo: TCP over an unknown interface (10.0.0.1)"]
    gloo = {"layout": {"effective": {"backend": "gloo"}}}
    records = [record(names, 1.0, GLOO_SOCKET_IFNAME="eth0") | gloo for names in (taken[1:], taken, unknown, [])]
    assert [one.transport for one in shown_of([*records, record([], 1.0) | gloo])] == [
        "TCP over net1 (gloo)", "TCP over net1, net2 (gloo)", "TCP over an unknown interface (gloo)",
        "TCP over eth0 (gloo)", "TCP over the default network (gloo)",
    ]  # fmt: skip


@each_row("bad", [{}, {"comparison": 3}, {"comparison": [None, {"forecast": {"low": "x"}}]}])
def test_a_strange_record_is_shown_for_what_it_has(bad: dict[str, object]) -> None:
    """Nothing in a record that a job wrote can break the page."""
    assert shown_of([bad])[0].lines == ()


def test_the_interval_says_whether_the_flight_was_inside() -> None:
    """In words as well as by place."""
    forecast = Interval(low=0.8, mid=1.0, high=1.3)
    assert "inside it" in charts.interval(forecast, 1.2)
    assert "outside it" in charts.interval(forecast, 1.4)


def test_the_policy_names_the_very_blocks_of_the_page() -> None:
    """Hashes of the inline style and script; no host, no eval, nothing inline beyond them."""
    policy = pages.policy()
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy


@each_row(
    ("asked", "named"),
    [({"nodes": "0"}, "nodes=0"), ({"nodes": "²"}, "nodes=²"), ({"global_batch": "-4"}, "global_batch=-4"),
     ({"sequence_length": "1e9"}, "sequence_length=1e9"), ({"method": "magic"}, "method=magic")],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_allowed(asked: dict[str, str], named: str) -> None:
    """As any user's mistake."""
    with pytest.raises(Exception, match="must be") as caught:
        question(asked)
    assert str(caught.value).startswith(named)
