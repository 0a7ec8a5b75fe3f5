"""Pages: figures of true lengths, words for those who do not see them, no markup from a host; what-if; the cluster."""

import re
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError
from rigs.agents import agent
from rigs.command import drawn
from rigs.fleet import record_of, resource_of, resources
from rigs.recorded import H100, NAMES, snapshot, view
from rigs.tables import ROOT, each_row, rows_of

from agent.advice import advise
from agent.advice.advise import EMBEDDED_MODEL
from agent.advice.request import Request
from agent.base import units
from agent.base.options import QUESTION, RequestError, make_names_distinct, question_model
from agent.checks.verdict import judge
from agent.checks.view import build_view
from agent.cluster.gate import check_nodes as gate_of_nodes
from agent.cluster.nodes import Fleet, NodeRecord
from agent.http import pages, worker
from agent.http.worker import Answer, read_form
from agent.jobs.preflight import Report
from agent.pages import draw_node as picture_of, environment, render_report
from agent.terminal.advice import print_recommendation
from agent.terminal.findings import print_findings
from agent.terminal.measured import list_transports
from contracts import run_record
from contracts.finding import Interval

rows = rows_of(__file__)

HOSTILE = "<script>alert('&')</script>\"x"
FIGURES = environment().get_template("charts.html.j2").module


def widths(svg: str, kind: str) -> list[float]:
    return [float(w) for w in re.findall(rf'class="{kind}"[^>]*? width="([0-9.]+)"', svg)]


def picture(name: str) -> str:
    """The drawing of a recorded machine with what is wrong on it."""
    (node,) = view(name).topologies
    return picture_of(node, checks=view(name).checks)


@each_row("name", NAMES)
def test_every_device_is_drawn_and_no_line_is_red_where_nothing_is_wrong(name: str) -> None:
    """Each GPU and NIC once, a sentence that says the same; the link between CPUs is neither red nor dashed."""
    (node,) = view(name).topologies
    root = ElementTree.fromstring(picture(name))  # noqa: S314 - our own output
    classes = [element.get("class", "").split() for element in root.iter("rect")]
    assert sum("d-gpu" in names for names in classes) == len(node.gpus)
    assert sum("d-nic" in names for names in classes) == len(node.nics)
    assert all(near.gpu in root.get("aria-label", "") for near in node.nearest_nic)
    plain = picture_of(node)
    root = ElementTree.fromstring(plain) if plain else ElementTree.Element("svg")  # noqa: S314 - our own output
    kinds = [line.get("class", "") for line in root.iter("path")]
    assert "l-sys" not in kinds
    boxes = sum("d-frame" in (rect.get("class") or "") for rect in root.iter("rect"))
    assert kinds.count("l-cpus") == max(0, boxes - 1)
    nics = tuple(replace(nic, name=HOSTILE + nic.name) for nic in node.nics)
    hostile = picture_of(replace(node, hostname=HOSTILE, nics=nics))
    assert "<script" not in hostile and (not hostile or ElementTree.fromstring(hostile) is not None)  # noqa: S314


def test_missing_nics_and_sick_devices_stand_out() -> None:
    """A NIC whose port is down, a lost GPU and a GPU short of NVLinks carry their marks."""
    names = ("sick-h100-dead-hca", "sick-h100-gpu-lost", "sick-h100-nvlink-missing", H100)
    drawn = {name: picture(name) for name in names}
    assert drawn["sick-h100-dead-hca"].count('class="d-nic d-fail"') == 1
    assert "✗ GPU5" in drawn["sick-h100-gpu-lost"]
    assert "! NV16" in drawn["sick-h100-nvlink-missing"]
    assert "d-fail" not in drawn[H100]


def test_the_label_of_a_gpu_is_the_link_that_it_runs_at() -> None:
    """Four lanes in a slot of sixteen: said at that GPU, marked, with both bandwidths behind it; the others are x16."""
    drawn = picture("sick-l40s-x4")
    root = ElementTree.fromstring(drawn)  # noqa: S314 - our own output
    links = [(text.get("class"), text.text) for text in root.iter("text") if "x16" in (text.text or "")]
    assert sorted(links) == [("d-tiny", "Gen4 x16")] * 3 + [("d-tiny d-warn", "! Gen4 x4 of x16")]
    assert "GPU2: Gen4 x4 of x16, 6 GB/s each way as it runs, 24 GB/s planned each way" in drawn


@each_row("name", ["sick-h100-rdma-off", "sick-h100-thermal", H100])
def test_the_banner_counts_checks_in_one_sentence(name: str) -> None:
    """One failed check on ten devices, two readings of one GPU in one box; no gap between words."""
    seen = view(name)
    html = pages.render_node_page(seen, None, "", trouble=None)
    (banner,) = re.findall(r'<p class="verdict.*?</p>', html)
    words = re.sub(r"<[^>]+>", "", banner)
    assert "  " not in words
    count = seen.verdict.listed
    assert (
        words
        == {
            "sick-h100-rdma-off": f"✗ FAIL 1 failed, 1 warning; {count['unknown']} unknown, ",
            "sick-h100-thermal": f"✗ FAIL 3 failed; {count['unknown']} unknown, ",
            H100: f"✓ pass no problems found; {count['unknown']} checks could not run; ",
        }[name]
        + f"{count['pass']} passed"
    )
    assert "not a pass" not in html
    opened = re.search(r'<details id="unknowns"( open)?>', html)
    assert opened and bool(opened[1]) == (seen.verdict.word == "pass"), "those that could not run, without a click"
    boxes = re.findall(r'<li class="finding f-(?:fail|warn)">.*?</li>\n(?=<li class="finding|</ol>)', html, re.DOTALL)
    if name == "sick-h100-thermal":
        assert len(boxes) == 3
        shown = "".join(boxes)
        assert "slowed down to 1050" in shown and "gpu.thermal.hot" not in shown, "heat is one finding"


@each_row(("name", "dense"), [(H100, True), ("r760xa-2xA40-bf3", False)])
def test_the_matrix_follows_its_legend_and_names_every_nic(name: str, dense: bool) -> None:
    """With more than a dozen devices columns are NIC numbers as in nvidia-smi, and the rows name the devices."""
    html = pages.render_node_page(view(name), None, "", trouble=None)
    section = html[html.index('aria-labelledby="topology"') :]
    legend, drawing, matrix = (section.index(word) for word in ('class="legend"', "<svg class=", 'class="matrix'))
    assert legend < drawing < matrix
    head, _, rows = section[matrix:].partition("</thead>")
    assert (">NIC1<" in head, ">mlx5_1<" in head) == (dense, not dense)
    assert all(nic.name in rows for nic in view(name).topologies[0].nics)


def test_one_lost_gpu_does_not_hide_where_the_nics_of_the_others_are() -> None:
    html = pages.render_node_page(view("sick-h100-gpu-lost"), None, "", trouble=None)
    assert "PIX: GPU0 to mlx5_0; GPU1 to mlx5_1" in html and "unknown: GPU5" in html
    assert "Nearest NIC of each GPU (unknown for GPU5)" in html


def test_the_page_may_load_nothing_but_its_own_inline_blocks() -> None:
    policy = agent().get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


def test_a_node_is_not_drawn_with_the_faults_of_another() -> None:
    """Two nodes of one kind share every address: only the one whose NIC is dead shows it, in one report too."""
    both = build_view((snapshot(), snapshot("sick-h100-dead-hca")))
    healthy, sick = (picture_of(node, checks=both.checks) for node in both.topologies)
    assert "d-fail" not in healthy
    assert sick.count("d-nic d-fail") == 1


def test_a_report_of_several_nodes_counts_each_check_once_and_names_the_nodes() -> None:
    """The banner and the lists below it agree; what two nodes share is told with the node's name on each line."""
    view = build_view(tuple(map(snapshot, ("l40s-4x-pcie", "sick-l40s-x4", "sick-h100-rdma-off"))))
    whole = Report(snapshots=view.snapshots, checks=view.checks, topologies=view.topologies, verdict=view.verdict)
    html = render_report(whole)
    number = view.verdict.listed
    assert view.verdict.why == "2 failed, 2 warnings"
    assert f"<summary>{number['pass']} checks passed</summary>" in html
    assert f"<summary>{number['unknown']} checks could not run" in html
    for node in ("l40s-01", "l40s-sick-x4"):
        assert f"<li>{node}: GPU2 has no NIC on its own NUMA node" in html
    text = " ".join(drawn(print_findings, view.checks, width=200).split())
    assert f"{number['pass']} checks passed" in text
    assert "GPU2 has no NIC on its own NUMA node: the path to mlx5_0 is SYS. l40s-01, l40s-sick-x4" in text


def test_the_interval_says_whether_the_run_was_inside() -> None:
    """In words as well as by place."""
    forecast = Interval(low=0.8, mid=1.0, high=1.3)
    assert "inside it" in FIGURES.interval(forecast, 1.2) and "outside it" in FIGURES.interval(forecast, 1.4)


@each_row(("asked", "named"), rows("wrong_fields"))
def test_a_wrong_field_is_named_with_what_is_allowed(asked: dict[str, str], named: str) -> None:
    """As any user's mistake."""
    with pytest.raises(RequestError, match="must be") as caught:
        read_form(asked)
    assert str(caught.value).startswith(named)


@each_row(("transports", "shown"), rows("transports"))
def test_the_transports_of_a_run_in_its_row(transports: list[str], shown: str) -> None:
    """NCCL's interface is that of its data only if sockets carry the data."""
    assert list_transports(run_record.record_of({"transports": transports, "nccl": {"interfaces": ["eth0"]}})) == shown


def page(host: str = "sick-h100-memlock-64KiB", **fields: str) -> str:
    known = worker.WorkerData()
    known.view = view(host)
    answer = worker.answer(known, "what_if", {"fields": tuple(fields.items())})
    assert isinstance(answer, Answer)
    return answer.body.decode()


def test_the_form_shows_what_was_asked_and_names_a_wrong_field() -> None:
    text = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2", price="90")
    assert 'name="price" maxlength="16" value="90"' in text
    again = page(model="meta-llama/Llama-3.1-8B", machine="h100")
    assert re.findall(r"<option selected>([^<]*)", again)[::2] == ["meta-llama/Llama-3.1-8B", "h100"], "as asked"
    refused = page(model="Llama-3.1-8B", machine="p5.48xlarge", price="cheap")
    assert "price=&#39;cheap&#39;: must be a number" in refused
    assert "? No layout: AMD GPUs are not supported" in page(model="Llama-3.1-8B", machine="mi300x")


def test_the_form_allows_what_the_question_allows() -> None:
    """The last value of each number is answered, and the one after it is refused."""
    html = page()
    limits = dict(re.findall(r'<input name="(\w+)" type="number" min="1" max="(\d+)"', html))
    assert set(limits) == {"nodes", "sequence_length", "global_batch", "steps"}
    for name, most in limits.items():
        assert question_model().model_validate({name: most})
        with pytest.raises(ValidationError):
            question_model().model_validate({name: str(int(most) + 1)})
    for name in ("method", "transport"):
        shown = re.search(rf'<select name="{name}">(.*?)</select>', html)
        assert shown and re.findall(r"<option[^>]*>(\w+)<", shown[1]) == QUESTION[f"--{name}"]["choices"]


def test_run_time_and_cost_have_fields_and_the_page_names_them() -> None:
    """Where one is empty the page says which to fill in."""
    empty = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2")
    for name, label in (("steps", "Run length (steps)"), ("price", "Price per node-hour")):
        assert f'<label>{label} <input name="{name}"' in empty and f"“{label}”" in empty
    assert "--steps" not in empty and "--price" not in empty
    full = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2", steps="2000", price="98.32")
    assert "not estimated" not in full
    time, cost = (re.search(rf"<dt>{word}</dt><dd>([\d.]+ ?\w*)", full) for word in ("time", "cost"))
    assert time and cost


def test_no_layout_is_called_slower_than_one_with_a_larger_step_time() -> None:
    """On every machine here, and for the small run, whose layout is not the fastest: what is said and what is shown."""
    wrong, said = [], 0
    for name in NAMES:
        for method in ("full", "lora"):
            advice = advise.advise_view(view(name), Request.of(model="Llama-3.1-8B", method=method, nodes=2))
            for shown in (advice, advise.with_fsdp(advice)):
                for other in shown.runners_up:
                    step, mine = shown.chosen.forecast.step_seconds.mid, other.forecast.step_seconds.mid
                    word = re.match(r"[\d.]+% (slower|faster)", other.why)
                    said += word is not None
                    if word and (mine < step) != (word[1] == "faster") and mine != step:
                        wrong.append((name, method, step, mine, other.why))
    assert not wrong and said > 50, (wrong, said)


def test_a_small_run_that_is_not_the_fastest_says_so_before_its_layout() -> None:
    """In page and terminal: both layouts with their forecasts, and no recommendation."""
    advice = advise.with_fsdp(
        advise.advise_view(view("cpu-only-vm"), Request.of(model=EMBEDDED_MODEL, nodes=2, ranks_per_node=1))
    )
    assert advice.chosen is not None and advice.chosen.layout.family == "FSDP"
    fastest = min(advice.runners_up, key=lambda one: one.forecast.step_seconds.mid)
    times = [units.seconds(one.forecast.step_seconds.mid) for one in (advice.chosen, fastest)]
    terminal = drawn(print_recommendation, advice, width=200, brief=True)
    for text in (terminal, pages.render_what_if_page(view(), {}, advice, "")):
        first = text.index("This small test run uses FSDP to show sharded traffic")
        assert all(time in text[first : first + 250] for time in times), times
        assert text.index("micro-batch") > first and "Recommended layout" not in text


def test_what_this_host_loses_stands_beside_its_layouts() -> None:
    text = page(model="Llama-3.1-8B", method="full", nodes="2")
    assert "limits.memlock.low: no RDMA, TCP over eno1" in text and "slower than healthy nodes" in text
    assert "slower than healthy nodes" not in page("hgx-h100-8xH100-8hca", model="Llama-3.1-8B", nodes="2")


FLEET = ("hgx-h100-8xH100-8hca", "sick-h100-nvlink-missing", "sick-h100-memlock-64KiB", "sick-h100-thermal")


def published(*records: NodeRecord) -> Fleet:
    """As a watch of the NodeTopology resources has them: object and status, read back."""
    held = Fleet()
    held.replace(map(resource_of, records))
    return held


def fleet_page(held: Fleet, **asked) -> str:
    return pages.render_fleet_page(held, source="kubernetes", list_error=None, **asked)


def shown(held: Fleet, **asked):
    return pages.collect_fleet_values(held, time.time(), **asked)


def names_in(html: str) -> list[str]:
    table = html.split('<table class="nodes">')[1].split("</table>")[0]
    return re.findall(r'<a href="cluster\?node=[^"]*">([^<]+)', table)


def test_sick_nodes_come_first_and_silent_ones_are_unknown() -> None:
    """Order, first fault with its remedy, age; what a silent node said last does not count as its verdict."""
    silent = record_of(FLEET[0], "silent", scanned_at_seconds=time.time() - 7200)
    held = published(*map(record_of, FLEET), silent)
    html = fleet_page(held)
    assert names_in(html) == [
        "hgx-h100-sick-memlock", "hgx-h100-sick-nvlink", "hgx-h100-sick-thermal", "silent", "hgx-h100-01",
    ]  # fmt: skip
    assert "RLIMIT_MEMLOCK is 64 KiB" in html and "LimitMEMLOCK" in html
    seen = shown(held)
    failed = {check.node for check in seen.checks if check.status == "fail"}
    assert len(failed) == seen.counts["fail"] == 3 and seen.counts["unknown"] == 1
    assert {group.status for group, _ in seen.faults if "silent" in group.id} == {"unknown"}
    assert re.search(r"silent for 2(\.0\d)? h", html.lower())  # and what this test has taken since
    assert "source: kubernetes" in html


@each_row(("nodes", "sick"), [(1, True), (1, False), (64, True), (64, False), (400, True)])
def test_the_head_counts_what_the_tally_and_the_list_below_it_count(nodes: int, sick: bool) -> None:
    """Nodes as their verdicts are, findings as they are listed: one node that is sick is one of one."""
    held = Fleet()
    held.replace(resources(nodes, sick=sick))
    html, seen = fleet_page(held), shown(held)
    tally = dict(re.findall(r'class="(fail|unknown|warn)" href="[^"]*">[^<]*: (\d+) node', html))
    said = re.search(r'class="verdict v-\w+"><strong>[^<]*</strong> <span>([^<]*)</span>', html)
    whole = units.count(nodes, "node")
    words = [f"{tally[key]} {word}" for key, word in (("fail", "failed"), ("unknown", "unknown")) if key in tally]
    words += [f"{seen.counts['pass']} passed"] if "pass" in seen.counts else []
    found = f"; {units.count(len(seen.faults), 'finding')}" if sick else ""
    assert said and said[1] == f"{whole}: {', '.join(words)}{found}"
    assert sick == bool(tally.get("fail")) and nodes == len(seen.rows)


@each_row("nodes", [64, 400])
def test_equal_nodes_share_one_line_below_the_failed_ones(nodes: int) -> None:
    """Each failed node has its line; of the others those with the same findings, hardware and versions are one."""
    held = Fleet()
    held.replace(resources(nodes, sick=True))
    html, seen = fleet_page(held), shown(held)
    bad = seen.counts["fail"] + seen.counts["unknown"]
    lines = html.split('<table class="nodes">')[1].split("</table>")[0].count("<tr>") - 1
    assert lines <= bad + 1 and html.count("no finding") == 1
    first, last = names_in(html)[: seen.counts["fail"]], names_in(html)[-1]
    assert [row.word for row in seen.rows if row.name in first] == ["fail"] * seen.counts["fail"]
    assert f"<summary>{nodes - bad} equal nodes</summary>" in html and last not in first
    assert seen.matching == nodes == sum(map(len, seen.shown))
    report = Report(checks=seen.checks, verdict=seen.verdict, nodes=tuple(held.records()))
    assert f"<summary>{nodes - bad} equal nodes</summary>" in render_report(report)
    held = Fleet([*held.records(), record_of(FLEET[0], "other", links="NV4")])
    assert fleet_page(held).count("no finding") == 2


ODD: list = [
    "text", [1], {"gpus": "eight"}, {"gpus": 10**400}, {"gpus": True}, {"interval": 10**400}, {"interval": -1},
    {"interval": "x"}, {"findings": [1]}, {"findings": {"code": "x"}}, {"findings": [{"code": {}}]}, {"changes": "x"},
    {"verdict": "splendid"}, {"verdict": {}}, {"product": 1},
    {"links": []}, {"facts": 1}, {"facts": "text"},
    {"scannedAt": 10**400}, {"node": ["x"]}, {"agentVersion": 1},
    {"stoppedAt": [], "scannedAt": "9999-99-99T00:00:00Z"}, {"facts": "H4sI"},
]  # fmt: skip


@each_row("status", ODD)
def test_one_object_that_the_definition_would_refuse_hides_no_other(status) -> None:
    """Where the definition is older, or was changed by hand: that node is unknown, the others are as ever."""
    good = resource_of(record_of(FLEET[0]))
    whole = {"scannedAt": good["status"]["scannedAt"], **status} if isinstance(status, dict) else status
    held = Fleet()
    held.replace([{"metadata": {"name": "odd"}, "status": whole}, good])
    seen = {one.name: one for one in held.records()}
    assert set(seen) == {"odd", good["metadata"]["name"]} and seen["odd"].verdict == "unknown"
    assert fleet_page(held)
    assert judge(gate_of_nodes(sorted(seen), held)).word != "pass"


def test_without_kubernetes_the_page_says_how_to_see_more() -> None:
    """One agent knows its own node only."""
    http = agent()
    told = http.get("/nodes").json()
    assert [node["name"] for node in told["nodes"]] == ["hgx-h100-01"] and "--publish" in told["note"]
    assert "--publish" in http.get("/cluster").text


def test_the_node_with_two_links_fewer_differs_from_its_peers() -> None:
    """Machines are compared to the last link; heat makes no other machine."""
    (family,) = shown(published(*map(record_of, FLEET))).families
    odd = {group.nodes: [one.message for one in group.differences] for group in family.odd}
    assert any("NVLinks 18 -> 16" in text for text in odd["hgx-h100-sick-nvlink",])
    assert any("memlock unlimited -> 64 KiB" in text for text in odd["hgx-h100-sick-memlock",])


def test_a_large_cluster_keeps_the_page_readable() -> None:
    """The rows are bounded, the sick ones are among them, and the page says where the rest is."""
    many = [record_of(FLEET[0])] * pages.ROWS  # each with other links, so that no two share a line
    held = published(
        *(replace(one, name=f"node-{n:04}", links=f"NV{n}") for n, one in enumerate(many)),
        record_of(FLEET[2], "zz-sick"),
    )
    html = fleet_page(held)
    rows = names_in(html)
    assert rows[0] == "zz-sick"
    assert len(rows) == pages.ROWS
    assert "Page 1 of 2" in html and f"{pages.ROWS + 1} nodes" in html
    assert names_in(fleet_page(held, page=2)) == ["node-0099"]
    assert len(html) < 2_000_000


def test_nothing_published_is_said() -> None:
    """An empty cluster says how to deploy the agent, in the commands of the documentation."""
    html = fleet_page(Fleet())
    assert "<form" not in html and "0 nodes: none published yet" in html
    assert "<title>unknown" in html and 'class="verdict pass' not in html
    deploy = html.split('<pre id="deploy">')[1].split("</pre>")[0].splitlines()
    documented = (ROOT / "docs" / "how-to" / "deploy-kubernetes.md").read_text() + (ROOT / "README.md").read_text()
    assert len(deploy) == 3 and all(f"$ {line}\n" in documented for line in (x.strip() for x in deploy)), deploy


def test_recordings_of_one_host_name_get_the_names_of_their_files() -> None:
    """Pods often share a host name; a name that only one recording has stays as it is."""
    pod = snapshot("r760xa-2xA40-bf3")
    found = make_names_distinct((pod, pod, snapshot()), [Path("a/pod.json"), Path("b/pod.json"), Path("node.json")])
    assert [one.hostname for one in found] == ["lora-worker-0 (pod)", "lora-worker-0 (pod) 2", "hgx-h100-01"]
    assert make_names_distinct((pod,), [Path("a/pod.json")]) == (pod,)


def test_ages_and_counts_are_said_as_people_say_them() -> None:
    """An age in its largest unit; counts worst first, no zeros, no "1 warnings"; an interval with its units."""
    ends = {(0.528, 1.0): "727 ms (528 ms to 1 s)", (0.528, 0.9): "727 ms (528 to 900)"}
    assert {each: units.interval(Interval(low=each[0], mid=0.727, high=each[1]), "s") for each in ends} == ends
    ages = {0: "0 s", 60: "60 s", 120: "2 min", 7200: "2 h 0 min", 2e5: "2 d 7 h"}
    assert {seconds: units.duration(seconds) for seconds in ages} == ages
    counts = {"pass": 120, "fail": 0, "warn": 1, "unknown": 2, "info": 3}
    assert units.tally(counts) == "1 warning, 2 unknown, 120 passed"
    assert units.rest("fail", {"fail": 1, "warn": 2, "pass": 3}) == "3 passed"
    assert units.rest("pass", {"unknown": 1, "pass": 3}) == "3 passed" and units.rest("pass", {"unknown": 2}) == ""
    assert (units.bits(5e10), units.bits(4.5e11)) == ("400 Gb/s", "3.6 Tb/s")


def test_a_finding_has_the_same_remedy_on_every_page() -> None:
    """What the node's own page says, its record carries, and so the cluster's page and gate."""
    for name in FLEET[1:]:
        own = {(c.code, c.subject): c.remedy for c in view(name).checks if c.remedy}
        held = published(record_of(name))
        checks = [c for c in pages.check_records(held, time.time()) if c.status in ("fail", "warn")]
        assert checks and all(c.remedy == own[c.code, c.subject] for c in checks)


def test_the_search_reads_names_verdicts_and_findings() -> None:
    """All words have to be in the row."""
    held = published(*map(record_of, FLEET))

    def names(**asked) -> list[str]:
        return [row.name for mine in shown(held, **asked).shown for row in mine]

    assert names(search="MEMLOCK") == names(search="limits.memlock.low") == ["hgx-h100-sick-memlock"]
    assert names(search="pass") == ["hgx-h100-01"]
    assert names(search="nv18 thermal") == ["hgx-h100-sick-thermal"] and names(search="no such word") == []
    assert names_in(fleet_page(held, search="thermal")) == ["hgx-h100-sick-thermal"]
    held = published(*map(record_of, (*FLEET, "cpu-only-vm")))  # which shows "driver unknown"
    found = {word: shown(held, search=word).matching for word in ("fail", "unknown", "warn", "pass")}
    assert found == {"unknown": 0, "warn": 0} | shown(held).counts
