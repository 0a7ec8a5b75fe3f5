"""What is made of the result of a search: findings, summary, picture, metrics, page, and the file between them."""

import html
import json
import random
import re
from dataclasses import replace
from xml.etree import ElementTree

from rigs.recorded import snapshot
from rigs.tables import each_row

from agent import metrics
from agent.base import result_store
from agent.http import pages
from agent.http.state import State
from agent.jobs import search
from bench.search import Fleet
from collectives.search.plan import DRAWN, Search, SearchResult, combine_passes
from contracts import plain

HOSTILE = "gpu-3<script>&"


def searched(
    count: int, faults: dict[int, tuple[str, float, str]], links: dict[tuple[int, int], float]
) -> SearchResult:
    """Search a simulated fleet."""
    draw = random.Random(1)
    fleet = Fleet(domains=[""] * count, sigma=0.005, draw=draw, own=[1.0] * count, faults=faults, links=links)
    found = Search(fleet.domains)
    while tests := found.next_round():
        found.report([fleet.run(test, set()) for test in tests])
    hosts = [HOSTILE if node == 3 else f"gpu-{node}" for node in range(count)]
    return combine_passes([found], hosts, began=1.7e9, seconds=60.0, node_minutes=8.0)


# Nodes, faults, links, codes of the findings, first line, bad nodes by metric, nodes of the picture.
RESULTS = [
    (8, {}, {}, [], "No bad node was found", 0, 8),
    (8, {3: ("slow", 1.0, "both")}, {}, ["search.node.slow"], f"Bad nodes: {HOSTILE}", 1, 8),
    (8, {3: ("dies", 0.0, "")}, {(5, 6): 3.0}, ["search.node.lost", "search.link.bad"],
     f"Bad nodes: {HOSTILE}; 1 bad link", 1, 8),
    (90, {3: ("stuck", 0.0, "both")}, {}, ["search.node.stuck"], f"Bad nodes: {HOSTILE}", 1, DRAWN),
]  # fmt: skip


@each_row("count, faults, links, codes, first, bad, drawn", RESULTS)
def test_a_result_is_told_alike_everywhere(count, faults, links, codes, first, bad, drawn, tmp_path, monkeypatch):
    result = searched(count, faults, links)
    assert [finding.code for finding in search.make_findings(result)] == codes
    assert search.summarise(result)[0] == first

    drawing = ElementTree.fromstring(search.draw_pairs(result))  # noqa: S314 - our own
    names = [text.text or "" for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(name.startswith("✗ ") for name in names) == 2 * bad, "the row and the column of a bad node"
    assert (len(result.drawn), {3, 5, 6} <= set(result.drawn)) == (drawn, True)
    marked = [cell for cell in drawing.iter("{http://www.w3.org/2000/svg}rect") if cell.get("stroke-width")]
    assert len(marked) == len(links)

    terms = json.loads(json.dumps(search.build_affinity(result)))
    fields = terms["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] if bad else []
    assert [field for term in fields for field in term["matchFields"]] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [HOSTILE]}] * bad  # fmt: skip

    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    result_store.save_search_result(plain.write(result))
    view = State(lambda: (snapshot(),), interval_seconds=3600, folder=tmp_path).refresh()
    assert view.search == result
    exposed = metrics.expose(view, "")[0].decode()
    assert re.search(rf'^topoflight_search_nodes{{status="bad"}} {bad}\.0$', exposed, re.MULTILINE)
    page = pages.render_node_page(view, None, "", trouble=None)
    assert html.escape(first, quote=False) in page and "<script>&" not in page
    plainly = pages.render_node_page(replace(view, search=None), None, "", trouble=None)
    assert page.count("<svg") == plainly.count("<svg") + 1


SLOW = plain.write(searched(8, {3: ("slow", 1.0, "both")}, {}))


@each_row("text", ["", "{}", "[1]", *(json.dumps(SLOW | changes) for changes in (
    {"hosts": ["gpu-0"]}, {"drawn": [9]}, {"drawn": [0]}, {"pairs": [[0, 1]]}, {"verdicts": []}, {"seconds": "1"},
))])  # fmt: skip
def test_a_damaged_result_is_left_out(text, tmp_path):
    (tmp_path / result_store.SEARCH_FILE).write_text(text)
    assert State(lambda: (snapshot(),), interval_seconds=3600, folder=tmp_path).refresh().search is None
