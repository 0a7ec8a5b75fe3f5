"""Every platform of data/platforms.toml on its built machine: what is recognised, what is advised, what the docs say.

And the advice on every recorded machine, as an expert would read it.
`TOPOFLIGHT_UPDATE_GOLDEN=1` redraws docs/reference/platforms.md.
"""

from dataclasses import asdict, replace
from pathlib import Path

import platform_machines as built
from jinja2 import Template
from nccl_env_hosts import settings
from rigs.recorded import H100, NAMES, snapshot
from rigs.tables import ROOT, data_of, each_row, hold_file, rows_of

from agent.advice.advise import advise_cluster
from agent.advice.request import Request
from agent.checks.host_checks import check_snapshot, mark_required
from agent.checks.verdict import judge
from contracts.tables import read_table
from planner.advice import Recommendation
from planner.forecast import machines
from planner.nccl_env import Platform, names, platforms
from planner.nccl_env.environment import render_settings
from planner.nccl_env.situation import make_situation, recognise
from probes.api import Snapshot
from topology.build import build
from topology.cluster import join

rows = rows_of(__file__)
TABLE = read_table(f"{ROOT}/planner/nccl_env/__init__.py", "data/platforms.toml")
EXPECTED = data_of(__file__, "nccl_env_platforms.yaml")


def seen(machine: str, **changes) -> Snapshot:
    """A built machine as the probes see it, or another one with what it changes."""
    if not changes:
        return built.snapshot(machine)
    return built.snapshot_of(built.describe(replace(built.NODES[machine], **changes)))


def advice(machine: str | Snapshot, *, multi_node: bool = True) -> Recommendation:
    """The advice for a job of several nodes like this one."""
    snapshot = seen(machine) if isinstance(machine, str) else machine
    return settings([snapshot], join([build(snapshot)]), multi_node=multi_node)


def transport(found: Recommendation) -> dict[str, str]:
    """What NCCL and libfabric read."""
    return {each.name: each.value for each in found.settings if each.name.startswith(("NCCL_", "FI_"))}


def row_of(machine: str | Snapshot) -> Platform | None:
    """The platform that the machine is recognised as."""
    snapshot = seen(machine) if isinstance(machine, str) else machine
    return recognise(make_situation([snapshot], join([build(snapshot)])).nodes[0])


@each_row("machine", EXPECTED)
def test_settings_of_the_built_machine(machine: str) -> None:
    """Recognised by its facts, and given what is right there and no more."""
    expected, row, found = EXPECTED[machine], row_of(machine), advice(machine)
    assert (row.name if row else None) == expected.get("platform")
    assert transport(found) == expected.get("sets", {})
    assert not [each for each in found.settings if each.name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")]
    # nothing of HCAs, interfaces, classes or plugins: nothing leaves the node
    alone = advice(machine, multi_node=False)
    assert not transport(alone).keys() - {"NCCL_TOPO_FILE"}
    told = {each.topic for each in alone.notes}
    assert not [name for name in told if name.startswith(("NCCL_IB_", "NCCL_NET", "NCCL_SOCKET", "NCCL_CROSS", "FI_"))]
    assert not {"platform", "NCCL_MNNVL_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_IGNORE_CPU_AFFINITY"} & told


def test_every_machine_and_every_platform_is_covered() -> None:
    """A row without its machine says so by having none; a machine without its expectation is none."""
    assert set(EXPECTED) == set(built.MACHINES)
    assert {row.machine for row in platforms() if row.machine} <= set(EXPECTED)
    assert [row.name for row in platforms() if row.machine is None] == ["Azure NC RTX PRO 6000 v6", "Azure ND40rs v2"]


@each_row("machine", ["gcp-a3-high", "gcp-a3-mega", "gcp-a3-ultra", "gcp-a4", "gcp-a4x"])
def test_vendors_script_is_named_and_never_overwritten(machine: str) -> None:
    """What it sets is said; where it is not on the disk that is said too."""
    found = advice(machine)
    (note,) = [each for each in found.notes if each.topic == "platform"]
    row = row_of(machine)
    there = [path for path in row.script if path in built.NODES[machine].files]
    assert (f"source {there[0]}" if there else "plugin") in note.text
    assert all(f"{name}={value}" in note.text for name, (value, _) in row.values().items())
    assert "detects this machine correctly" not in str(found.notes)


def test_machines_own_file_is_not_overwritten() -> None:
    """nccl.conf of the image says it already, and may say it otherwise."""
    own = "NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml\nNCCL_IGNORE_CPU_AFFINITY=1\n"
    files = {**built.NODES["azure-nd-h200"].files, "/etc/nccl.conf": own}
    assert transport(advice(seen("azure-nd-h200", files=files))) == {}


@each_row(
    ("change", "expected"),
    [
        ({"gpus": 4}, "OCI BM.GPU.H200.8"),  # half of the GPUs in a pod
        ({"tag": None, "vendor": "Supermicro", "product": "SYS-821GE"}, None),  # the same board elsewhere
        ({"tag": None, "vendor": "GIGABYTE", "product": "G593", "files": {"/run/cloud-init/cloud-id": "oracle"}}, ""),
        ({"nics": (built.Nics(kind="ib", count=8),)}, None),  # no RoCE: another fabric than the recipe's
    ],
)
def test_platform_is_recognised_by_facts_not_by_one_name(change: dict, expected: str | None) -> None:
    """Without the fact there is no class of OCI's on another's switches."""
    machine = seen("oci-h200", **change)
    row = row_of(machine)
    assert (row.name if row else None) == ("OCI BM.GPU.H200.8" if expected == "" else expected)
    assert ("NCCL_IB_TC" in transport(advice(machine))) is (expected is not None)


def test_unknown_machine_of_a_cloud_is_said_to_be_unknown() -> None:
    """No recipe is known for it: left out, with the facts that no row knows."""
    machine = seen("aws-p5", product="p9.96xlarge", nics=(built.Nics(kind="ib", count=4),))
    (note,) = [each for each in advice(machine).notes if each.topic == "platform"]
    assert note.text.startswith("Unknown platform")
    assert "p9.96xlarge" in note.evidence


def test_aws_instance_without_a_visible_efa_is_said_to_be_one() -> None:
    """A pod that asked for no EFA device runs over TCP in silence."""
    (note,) = [each for each in advice(seen("aws-p5", nics=())).notes if each.topic == "NCCL_NET"]
    assert "no EFA device is visible" in note.text
    assert "p5.48xlarge" in note.evidence


@each_row(("name", "expected"), rows("catalogue"))
def test_machine_of_the_catalogue_is_of_its_platform(name: str, expected: dict[str, str] | str) -> None:
    """The user says which machine it is: what is published for it holds."""
    found = settings([], machines.cluster(name, 4))
    assert transport(found) == (EXPECTED[expected]["sets"] if isinstance(expected, str) else expected)
    said = {"a3-megagpu-8g": "nccl-env-profile.sh", "ND96isr_H200_v5": "/ndv5/topo.xml"}.get(name, "")
    published = [each.text for each in found.notes if each.topic == "published"]
    assert said in render_settings(found.settings, "env", found.notes) + str(published)


@each_row(("machine", "change", "link", "says"), rows("plugins"))
def test_the_forecast_names_the_network_of_the_vendors_plugin(machine: str, change: dict, link: str, says: str) -> None:
    """Its rate is that of the NICs only if the scan shows a file of the plugin."""
    request = Request.of(model="Llama-3.1-8B", method="full", nodes=2)
    scanned = seen(machine, **change)
    found = advise_cluster(request, request.cluster((scanned,)), (scanned,))
    (network,) = [line for line in found.unknowns if line.startswith("network between the nodes")]
    assert f": {link} at " in network and says in network


def test_recipes_are_whole() -> None:
    """Each has its source with a date and sets only what it publishes; NCCL or a plugin reads every name.

    Every name of the catalogue is one that --machine answers to.
    """
    table = platforms()
    assert {name for row in table for name in row.catalogue} <= set(machines.names())
    for row in table:
        for recipe in row.recipes:
            assert recipe.set <= set(recipe.values), row.name
            assert ", 2026-" in recipe.source, row.name
    known = {name for row in table for name in row.values()}
    plugins = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "FI_", "NCCL_IB_NET_LATENCY")  # the last: no NCCL reads it
    assert not [name for name in known if not name.startswith(plugins) and name not in names()]


# -- The docs ---------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """What is published for each platform and what of it is advised, as a table; why the rest is not set."""
    sources: list[dict] = []
    why: dict[str, dict[str, None]] = {}
    rows: list[tuple[Platform, list[int], str, dict[str, list[str]]]] = []
    for raw, row in zip(TABLE["platform"], platforms(), strict=True):
        recipes = [TABLE["recipe"][key] for key in raw["recipes"]]
        keys = [each["source"] for each in recipes] + [key for each in recipes for key in each.get("more", ())]
        named = [TABLE["source"][key] for key in dict.fromkeys(keys)]
        sources += [each for each in named if each not in sources]
        published = {name: (value, each) for each in recipes for name, value in each["values"].items()}
        ours = transport(advice(row.machine)) if row.machine else {}
        found = {
            "advised": [f"{name}={value}" for name, (value, _) in published.items() if ours.get(name) == value],
            "not_set": [f"{name}={value}" for name, (value, _) in published.items() if name not in ours],
            "ours": [f"{name}={value}" for name, value in ours.items() if value != published.get(name, ("",))[0]],
        }
        for name, (_, each) in published.items() if row.machine and not (row.amd or row.plugin) else ():
            if name not in ours:  # `by` names what sets the variables of a recipe
                why.setdefault(each.get("by") or TABLE["why"][name], {})[name] = None
        alike = next((other.name for other, *_, each in rows if each == found and any(each.values())), "")
        rows.append((row, [sources.index(each) + 1 for each in named], alike, found))
    template = Template(Path(__file__).with_name("platforms.md.j2").read_text(encoding="utf-8"), trim_blocks=True)
    reasons = [f"- {reason}: {', '.join(f'`{name}`' for name in names)}\n" for reason, names in why.items()]
    return {
        "reference/platforms.md": template.render(rows=rows, sources=sources),
        "decisions/0024-published-and-not-set.md": "".join(reasons),
    }


def test_page_of_platforms_is_drawn_from_the_data() -> None:
    """docs/reference/platforms.md, and its reasons in docs/decisions; the text above the table is written by hand."""
    for name, text in pages().items():
        path = ROOT / "docs" / name
        head, mark, _ = path.read_text(encoding="utf-8").partition(f"\n{text[:2]}")
        assert mark, f"{name} has no table"
        hold_file(path, f"{head}\n{text}")


def test_machine_of_amd_gpus_is_seen_not_judged_and_laid_out_for_nobody() -> None:
    """No pass over GPUs that nothing read, no layout over zero GPUs, and no setting of NCCL's own."""
    snapshot = built.snapshot("oci-mi300x")
    (said,) = [one for one in check_snapshot(snapshot) if one.code == "pci.gpu.unsupported"]
    assert said.status == "unknown" and "AMD GPUs were found" in said.message
    checks = mark_required(snapshot, check_snapshot(snapshot))
    assert judge([one for one in checks if one.code.startswith("gpu.")]).word == "unknown"
    found = advise_cluster(Request.of(model="tiny-llama"), Request().cluster([snapshot]), [snapshot])
    assert found.backend == "rccl"
    assert found.chosen is None
    assert not found.runners_up
    assert not [one.name for one in found.settings if one.name.startswith(("NCCL_", "FI_"))]


@each_row("name", NAMES)
def test_golden_advice_on_machine(name, golden):
    """The whole advice, reasons included, stays what was read and approved."""
    found = settings([snapshot(name)], join([build(snapshot(name))]))
    told = {part: [asdict(each) for each in getattr(found, part)] for part in ("settings", "notes", "needs")}
    golden(f"{name}/settings.json", told)


@each_row("order", [1, -1], ids=["healthy-first", "sick-first"])
def test_a_port_that_is_down_is_named_whichever_node_comes_first(order: int) -> None:
    """The evidence is that of the node whose ports decide, not of the first one."""
    found = [snapshot(name) for name in (H100, "sick-h100-dead-hca")][::order]
    advice = settings(found, join([build(each) for each in found]), multi_node=True)
    hca = next(setting for setting in advice.settings if setting.name == "NCCL_IB_HCA")
    assert "mlx5_3:1 is DOWN" in hca.reason.evidence
