"""Probes on small hosts made by hand, on any bytes in any file, and the texts of their findings."""

import ast
import dataclasses
import errno
import importlib
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest
import yaml
from dicthost import Content, DictHost
from hypothesis import given, settings, strategies as st
from rigs.tables import ROOT, data_of, each_row, golden_rows

from contracts.finding import Status
from contracts.tables import read_table
from probes.api import UnavailableError
from probes.gpu.health import WORDS
from probes.hostinfo import probe as hostinfo
from probes.hostinfo.read import detect_container, is_of_agent, read as read_hostinfo
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.limits.read import read as read_limits
from probes.pci import probe as pci
from probes.rdma import probe as rdma
from probes.registry import ALL, BY_NAME
from probes.worker import reader


def read_and_check(row: dict) -> dict:
    """Return the facts, the findings, and the codes that these facts cannot decide."""
    probe = BY_NAME[row["probe"]]
    try:
        facts = reader(probe.name)(DictHost(**row["host"]))
    except UnavailableError as error:
        return {"absent": str(error)}
    found = [[each.code, each.status, each.subject, each.message] for each in probe.check(facts)]
    return {"facts": facts, "findings": found, "unjudged": dict(probe.unjudged(facts))}


def test_golden_hosts() -> None:
    """A row says what it shows; rows that differ in one fact are adjacent."""
    golden_rows("probes.jsonl", "says", read_and_check)


XEON = Path(__file__).with_name("cpuinfo_xeon.txt").read_text(encoding="utf-8")
GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
DMI = "/sys/class/dmi/id/"
ID = "5de52e359e15c1016d1777924320aef87fc439d8be297303af47b7d2f1e82164"
POD = "0e4d2c1a-5f6b-4a3e-9d8c-7b6a5f4e3d2c"
TEXT = Path(__file__).with_name("container_kinds.yaml").read_text(encoding="utf-8")
ROWS = yaml.safe_load(TEXT.replace("{ID}", ID).replace("{POD}", POD))


@each_row(("grace", "flag", "vendor", "product", "name"), ROWS["hypervisors"])
def test_hypervisor(grace: bool, flag: str, vendor: str, product: str, name: str | None) -> None:
    cpuinfo = GRACE if grace else XEON.format(flag=flag)
    files = {"/proc/cpuinfo": cpuinfo, DMI + "sys_vendor": vendor + "\n", DMI + "product_name": product + "\n"}
    assert read_hostinfo(DictHost(files)).virtual_machine == name


@each_row(("kind", "files", "environment"), ROWS["kinds"])
def test_container_is_known_by_its_engines_traces(kind, files, environment):
    """One trace is enough; a pod's goes before its engine's."""
    assert detect_container(DictHost(dict(files), environment=environment)) == kind


def test_the_agents_container_is_one_that_says_so() -> None:
    """On a host without container `serve` shares what jobs get: its limits are judged."""
    role = {hostinfo.ROLE: "agent"}
    assert is_of_agent(DictHost({"/.dockerenv": ""}, environment=role))
    assert not is_of_agent(DictHost({"/.dockerenv": ""}))
    assert not is_of_agent(DictHost({}, environment=role))


MIB = 1 << 20
UNPRIVILEGED = "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t2\n"
TABLES = data_of(__file__, "limits_rows.yaml")


def host(status: str = UNPRIVILEGED, memlock=(65536, 65536), files=None, rdma: bool = True, **more) -> DictHost:
    """A pod with an RDMA device and Docker's defaults."""
    device = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA"} if rdma else {}
    bounds = {"MEMLOCK": memlock, "NOFILE": (1024, 524288), "NPROC": (None, None)}
    shm = {"shm": (64 * MIB, 60 * MIB)}
    return DictHost({"/proc/self/status": status, **device, **(files or {})}, limits=bounds, **{**shm, **more})


@each_row(("machine", "code", "severity", "words"), TABLES["wrong"])
def test_what_is_wrong_with_the_limits(machine, code, severity, words):
    given = {} if machine == "bare" else dict(machine)
    gpus = given.pop("gpus", None)
    read = replace(read_limits(DictHost() if machine == "bare" else host(**given)), gpus=gpus)
    found = next((finding for finding in limits.check(read) if finding.code == f"limits.{code}"), None)
    assert (found.status if found else None) == severity
    assert not found or words in f"{found.message} {found.evidence} {found.remedy}"


def test_unlimited_is_exported_as_infinity_and_unknown_not_at_all() -> None:
    exported = {(s.metric, s.labels): s.value for s in limits.samples(read_limits(host(memlock=(65536, None))))}
    assert exported["limits_memlock_bytes", ("soft",)] == 65536
    assert exported["limits_memlock_bytes", ("hard",)] == float("inf")
    assert not [s for s in limits.samples(read_limits(DictHost())) if s.metric == "limits_memlock_bytes"]


@each_row(("conf", "of", "reason"), TABLES["slurm"])
def test_the_memlock_limit_is_the_jobs_or_is_not_judged(conf: str | None, of: str, reason: str | None) -> None:
    """Slurm gives a job the limit of the shell that submits it, or slurmd's; the other one says nothing."""
    files = {} if conf is None else {"/etc/slurm/slurm.conf": f"ClusterName=c\n{conf}\n"}
    facts = read_limits(host(files=files, environment=TABLES["slurm_environments"][of]))
    raised = any(found.code == "limits.memlock.low" for found in limits.check(facts))
    why = limits.unjudged(facts).get("limits.memlock.low")
    assert (raised, why is None) == (reason is None, reason is None) and (reason or "") in (why or "")
    assert ("Slurm job 7" in facts.whose) == (of == "a step")


HOST = data_of(__file__, "any_bytes.yaml")
FILES, LINKS = HOST["files"], HOST["links"]
SOUND: dict[str, Content] = {**dict.fromkeys(FILES, "1\n"), **HOST["sound"]}
NETLINK = {"links": [{"index": 2, "IFLA_IFNAME": "eth0", "flags": 0x1043}]}
PLAUSIBLE = st.sampled_from(HOST["plausible"])
CONTENT = st.binary(max_size=600) | PLAUSIBLE | st.sampled_from([errno.EINVAL, errno.EACCES, errno.EIO, errno.ENODEV])
PROBES = (hostinfo.PROBE, limits.PROBE, pci.PROBE, rdma.PROBE, interfaces.PROBE)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
@given(
    damage=st.dictionaries(st.sampled_from(FILES), CONTENT, min_size=1, max_size=12),
    gone=st.sets(st.sampled_from(sorted(LINKS)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_any_bytes(probe, damage, gone):
    links = {path: target for path, target in LINKS.items() if path not in gone}
    host = DictHost(
        {**SOUND, **damage}, links, netlink=NETLINK, register_limit_bytes=1, shm=(1, 1), limits={"MEMLOCK": (1, 1)}
    )
    try:
        facts = reader(probe.name)(host)
    except UnavailableError:
        return
    assert {finding.code for finding in probe.check(facts)} <= set(probe.codes)
    families = {metric.name: metric for metric in probe.metrics}
    for sample in probe.samples(facts):
        assert len(sample.labels) == len(families[sample.metric].labels)


def test_the_sound_host_is_read_by_every_probe() -> None:
    host = DictHost(SOUND, LINKS, netlink=NETLINK)
    assert [type(reader(probe.name)(host)) for probe in PROBES] == [probe.facts for probe in PROBES]


FOLDERS = [*(f"probes/{probe.name}" for probe in ALL), "topology"]
BETWEEN_SCANS = ROOT / "probes" / "increases.py"


def _texts(row: dict) -> list[str]:
    seen = row.get("evidence", [])
    return [row["message"], row.get("remedy", ""), *([seen] if isinstance(seen, str) else seen)]


@each_row("folder", FOLDERS)
def test_every_row_of_a_finding_is_raised_and_filled_in(folder: str) -> None:
    """A row has known members and a remedy; code has its key, and passes what its texts name."""
    paths = [*sorted((ROOT / folder).glob("*.py")), BETWEEN_SCANS]
    modules = [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in paths]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= set(WORDS["rule"]) if folder == "probes/gpu" else set()  # findings that one fact decides
    passed = {node.arg for node in nodes if isinstance(node, ast.keyword)} | words | {"subject"}
    facts = {
        field.name for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }  # fmt: skip
    wrong = []
    for key, row in read_table(str(ROOT / folder / "_"), "findings.toml").items():
        code, _, case = key.partition(" ")
        known = row.keys() <= {"status", "message", "evidence", "remedy"} and "message" in row
        status = row.get("status", "info")
        known = known and status in set(Status) and ("remedy" in row or status == "info")
        # whole, its two parts apart, or with a value as its second part
        raised = key in words or (code in words and {case, f" {case}"} & words) or f"{code} " in words
        wrong += [] if known and raised else [key]
        for _, name, _, _ in (part for text in _texts(row) for part in Formatter().parse(text)):
            root, _, fact = (name or "subject").partition(".")
            if root not in passed or (fact and fact not in facts):
                wrong.append(f"{key}: {{{name}}}")
    assert wrong == []
