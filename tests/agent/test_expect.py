"""`--expect`: what a node must have. Absent is failed, unread is unknown, a word not understood is named."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from fastapi.testclient import TestClient
from kustomization import render
from rigs.command import topoflight
from rigs.recorded import H100, changed, of_code, path_of, snapshot, statuses, with_outcomes
from rigs.tables import each_row

from agent.checks.expect import KEYS, Expectation, expectation, parse, read_file
from agent.checks.expect_checks import EXPECT_CODES
from agent.checks.verdict import GateError, judge
from agent.checks.view import look
from agent.cluster.gate import checks_of as gate_of_nodes
from agent.cluster.nodes import Fleet
from agent.cluster.records import records_of
from agent.http.serve import _expected
from agent.http.server import create
from agent.http.state import State
from probes.api import Failed, Snapshot
from probes.gpu.facts import GpuFacts
from probes.limits.probe import LimitsFacts
from probes.rdma.facts import RdmaFacts

ROOT = Path(__file__).parents[2]
ALL_OF_IT = "gpus=8,gpu=H100,nvlink=NV18,hcas=8,rate=200,gdr=on,memlock=unlimited,shm=1GiB,interface=eno1,driver=550"


def preflight(name: str, *options: str) -> Result:
    return topoflight("preflight", "-q", "--host", path_of(name), *options)


def judged(found: Snapshot, words: str) -> dict[str, str]:
    """Status of each expectation, by its subject."""
    checks = of_code(look((found,), expected=parse([words])), EXPECT_CODES[0])
    return {check.subject: check.status for check in checks}


def test_a_node_that_has_it_all_passes_and_says_each() -> None:
    """One check for each key."""
    found = judged(snapshot(), ALL_OF_IT)
    assert len(found) == len(KEYS)
    assert set(found.values()) == {"pass"}
    assert preflight(H100, "--expect", ALL_OF_IT).exit_code == 0


LESS = [
    # machine, expectation that it does not meet, what is told
    ("sick-h100-gpu-lost", "gpus=8", "7 GPUs answer"),
    (H100, "gpus=9", "8 GPUs answer"),
    ("cpu-only-vm", "gpus=1", "0 GPUs answer"),
    ("l40s-4x-pcie", "gpu=H100", "NVIDIA L40S"),
    ("cpu-only-vm", "gpu=H100", "no GPU"),
    ("sick-h100-nvlink-missing", "nvlink=NV18", "GPU0-GPU3 NV16"),
    ("l40s-4x-pcie", "nvlink=NV4", "GPU0-GPU1"),
    ("cpu-only-vm", "nvlink=NV18", "there is no pair to link"),
    ("sick-h100-dead-hca", "hcas=10", "9 RDMA devices have an ACTIVE port"),
    ("sick-h100-rdma-off", "hcas=8", ""),
    ("cpu-only-vm", "hcas=1", "0 RDMA devices"),
    (H100, "rate=400", "mlx5_4 200 Gb/s"),
    ("r760xa-2xA40-bf3", "gdr=on", "not possible"),
    ("sick-h100-no-peermem", "gdr=on", "not possible"),
    ("cpu-only-vm", "gdr=on", "not possible"),
    ("sick-h100-memlock-64KiB", "memlock=unlimited", "memlock is 64.0 KiB"),
    ("sick-h100-memlock-64KiB", "memlock=64MiB", "memlock is 64.0 KiB"),
    (H100, "shm=2TiB", "512.0 GiB"),
    (H100, "interface=net1", "there are"),
    (H100, "interface=net*", "there are"),
    (H100, "driver=550.91", "550.90.07"),
    (H100, "driver=570", "550.90.07"),
    (H100, "gpu=H10", "NVIDIA H100"),
    (H100, "rate=mlx5_[4-9]:400", "mlx5_4 200 Gb/s"),
    (H100, "rate=roce*:400", "no RDMA device named roce* has an ACTIVE port"),
    ("sick-h100-dead-hca", "rate=mlx5_[0-35-9]:200", "mlx5_3 has no ACTIVE port"),
    ("sick-h100-dead-hca", "hcas=mlx5_[0-3]:4", "3 RDMA devices of mlx5_[0-3] have an ACTIVE port"),
    ("cpu-only-vm", "driver=550", "unknown"),
]


@each_row(("machine", "words", "told"), LESS)
def test_absent_or_less_is_failed_and_unread_is_unknown(machine: str, words: str, told: str) -> None:
    """Exit code 3 with what is there; where the probe saw nothing of a device that the bus has, 5 at least."""
    view = look((snapshot(machine),), expected=parse([words]))
    (check,) = of_code(view, EXPECT_CODES[0])
    if machine == "sick-h100-rdma-off":  # the bus has ten HCAs and no RDMA device could be read
        assert (check.status, check.required) == ("unknown", True)
        return
    assert check.status == "fail", check
    assert told in check.message and words in check.subject and check.remedy
    assert view.verdict.exit_code == 3


@each_row("words", ["gpus=8", "gpu=H100", "nvlink=NV18", "driver=550", "hcas=1", "rate=100",
                                   "memlock=1GiB", "shm=1GiB", "interface=eno1", "gdr=on"])  # fmt: skip
def test_what_could_not_be_read_is_unknown_and_required(words: str) -> None:
    """A hung driver is no lost GPU: exit code 5 and not 3, whatever is expected."""
    gone = {name: Failed(error="no answer after 30.0 s") for name in ("gpu", "rdma", "limits", "interfaces", "pci")}
    view = look((with_outcomes(snapshot(), **gone),), expected=parse([words]))
    (check,) = of_code(view, EXPECT_CODES[0])
    assert (check.status, check.required) == ("unknown", True)
    assert "no answer after 30.0 s" in check.message
    assert view.verdict.exit_code == 5


WRONG = [
    ("gpuss=8", "gpuss: no such expectation; one of gpus"), ("gpuss=8", "did you mean gpus?"),
    ("gpus", "must be KEY=VALUE"),
    ("gpus=eight", "gpus=eight: must be a number from 0 to 1024"), ("gpus=-1", "must be a number"),
    ("gpus=8,gpus=4", "gpus stands 2 times"), ("nvlink=18x", "NV1 to NV99"), ("nvlink=0", "NV1 to NV99"),
    ("gdr=off", "must be on"), ("gdr=maybe", "must be on"), ("memlock=lots", "unlimited, or bytes"),
    ("shm=1XB", "bytes, with a unit"), ("shm=", "bytes, with a unit"), ("memlock=unlimted", "did you mean unlimited?"),
    ("gpu=8", "gpu=8: must be part of a GPU's model"), ("gpu=8", "write gpus=8"), ("gpu= 80 ", "letters in it"),
    ("interface=1", "interface's name"), ("rate=mlx5/0:400", "mlx5_[0-7]:400"), ("hcas=mlx5_*:many", "a number from 0"),
    ("rate=fast", "gigabits a second"),
    ("interface=net/1", "interface's name"), ("interface=", "interface's name"),
    ("=8", "no such expectation"), ("interface=net1,net2", "net2: must be KEY=VALUE"),
    ("gpu=", "part of a GPU's model"), ("driver=new", "release of NVIDIA's driver"),
]  # fmt: skip


@each_row(("words", "told"), WRONG)
def test_what_is_not_understood_is_an_error_that_names_what_is_allowed(words: str, told: str) -> None:
    with pytest.raises(GateError) as caught:
        parse([words])
    assert told in " ".join(str(caught.value).split())


def test_what_is_not_understood_stops_a_verb_before_anything_is_scanned() -> None:
    """Exit code 2; `serve` does not start either."""
    for words in (("preflight", "-q", "--host", path_of()), ("serve", "--port", "0")):
        done = topoflight(*words, "--expect", "gpuss=8")
        assert done.exit_code == 2 and "gpuss: no such expectation; one of gpus" in " ".join(done.stderr.split())


MET = {
    # of the HGX H100 with 512 GiB of /dev/shm, eight HCAs of 400 Gb/s and two of 200 Gb/s for storage (mlx5_4, mlx5_5)
    "shm": ("16G", "16Gi", "16GiB", "16GB", "16 GiB", "0.5T", "16g", "17179869184"),
    "memlock": ("16G", "64MiB", "Unlimited"),
    "rate": ("mlx5_[0-3]:400", "mlx5_[0-3]:400,rate=mlx5_[4-5]:200Gb/s", "200", "200Gbps"),
    "hcas": ("10", "mlx5_[0-3]:4", "mlx5_[0-3]:4,hcas=mlx5_[45]:2"),
    "gpu": ("h100", "H100 80GB", "NVIDIA H100"),
}


def test_every_spelling_of_a_value_that_holds_is_met() -> None:
    """Sizes with units, devices by a pattern, whole words of a model."""
    wrong = [f"{key}={value}" for key, values in MET.items() for value in values
             if {*judged(snapshot(), f"{key}={value}").values()} != {"pass"}]  # fmt: skip
    assert not wrong


def test_a_file_says_the_same_as_the_words(tmp_path: Path) -> None:
    """YAML's own spellings count: `on` is true, lists are several interfaces, numbers need no quotes."""
    path = tmp_path / "expect.yaml"
    path.write_text("gpus: 8\nnvlink: NV18\ngdr: on\nmemlock: unlimited\ninterface: [net1, net2]\ndriver: 550.9\n")
    words = "gpus=8,nvlink=NV18,gdr=on,memlock=unlimited,interface=net1,interface=net2,driver=550.9"
    assert read_file(path) == parse([words])
    assert expectation(["gpus=4"], path) == read_file(path).model_copy(update={"gpus": 4}), (
        "the command line goes before the file"
    )
    path.write_text("# gpus: 8\n")
    assert read_file(path) == Expectation()
    assert judged(snapshot(), "") == {}
    assert preflight(H100, "--expect-file", str(path)).exit_code == 0
    path.write_text("gpus: 9\n")
    assert preflight(H100, "--expect-file", str(path)).exit_code == 3


@each_row(
    ("text", "told"),
    [("gpuz: 8", "no such expectation"), ("gpus: {a: 1}", "must be one value"), ("gpus: [8, 8]", "must be one value"),
     ("- gpus", "one mapping"), ("gpus: 8\n---\nhcas: 8\n", "one mapping"), ("gpus: [", "not YAML"),
     ("gpus:", "must be one value"), ("gpus: [8]", "must be one value"), ("gpu: on", "in quotes"),
     ("interface: [1.5]", "in quotes"),
     ("gdr: off", "must be on"), ("a: &a 1\ngpus: *a\n", "aliases"), ("gpus: 8\n" + "#" * 70000, "larger than 65536"),
     ("interface: [" + ", ".join(["a"] * 65) + "]", "more than 64")],
)  # fmt: skip
def test_a_file_that_is_not_understood_is_named(text: str, told: str, tmp_path: Path) -> None:
    """Exit code 2 with the file's name, never a silent half."""
    path = tmp_path / "expect.yaml"
    path.write_text(text)
    with pytest.raises(GateError, match="--expect-file") as caught:
        read_file(path)
    assert told in " ".join(str(caught.value).split())


def test_files_that_cannot_be_read_are_usage_errors(tmp_path: Path) -> None:
    """A folder, a file that is not there, bytes that are no text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe gpus")
    for path in (tmp_path, tmp_path / "none", tmp_path / "bytes"):
        assert preflight(H100, "--expect-file", str(path)).exit_code == 2


def test_an_agent_judges_it_at_every_scan_and_reads_the_file_anew(tmp_path: Path) -> None:
    """What the DaemonSet's ConfigMap says: absent, there, changed, broken, fixed and withdrawn."""
    path = tmp_path / "expect.yaml"
    options = {"expect": (), "expect_file": path}
    state = State(lambda: (snapshot(),), interval_seconds=3600, expected=lambda: _expected(options))
    client = TestClient(create(state))

    def said() -> tuple[str, int]:
        state.refresh()
        verdict = client.get("/preflight").json()["verdict"]
        return verdict["word"], verdict["exit_code"]

    assert said() == ("pass", 0)
    path.write_text("gpus: 8\n")
    assert said() == ("pass", 0)
    path.write_text("gpus: 16\n")
    assert said() == ("fail", 3)
    assert records_of(state.view)[0].verdict == "fail" if state.view else False
    path.write_text("gpuz: 16\n")
    assert said() == ("unknown", 5)
    path.write_text("")
    assert said() == ("pass", 0)
    path.write_text("gpus: 16\n")
    assert said() == ("fail", 3)
    path.unlink()
    assert said() == ("pass", 0)


def fleet_of(found: Snapshot) -> Fleet:
    fleet = Fleet()
    (record,) = records_of(look((found,)))
    fleet.set([replace(record, scanned_at_seconds=time.time())])
    return fleet


@each_row(
    ("machine", "words", "code"),
    [(H100, "gpus=8,hcas=8,nvlink=NV18,memlock=unlimited,gpu=H100,rate=200", 0), (H100, "gpus=9", 3),
     (H100, "nvlink=NV19", 3),
     ("sick-h100-gpu-lost", "gpus=8", 3), (H100, "interface=net1", 3), ("sick-h100-no-peermem", "gdr=on", 3),
     (H100, "gdr=on", 0), ("cpu-only-vm", "gpus=1", 3), ("cpu-only-vm", "hcas=1", 3)],
)  # fmt: skip
def test_records_of_nodes_are_held_to_it_too(machine: str, words: str, code: int) -> None:
    """`--nodes` and `--selector`: a record carries what a scan read of the node."""
    fleet = fleet_of(snapshot(machine))
    (name,) = [record.name for record in fleet.records()]
    checks = gate_of_nodes([name], fleet, expected=parse([words]))
    assert judge(checks).exit_code == code, [c for c in checks if c.code == EXPECT_CODES[0]]


def test_a_record_of_another_release_meets_nothing() -> None:
    """Without facts or graph that this release reads everything expected is unknown, and required."""
    fleet = fleet_of(snapshot())
    later = {"facts": "later", "machine": {"gpu": {"gpus": [{"numbers": "0 1"}]}}}
    for without in ({"facts": None}, {"graph": None}, later):
        old = Fleet()
        old.set([replace(record, **without) for record in fleet.records()])  # type: ignore[arg-type]
        (name,) = [record.name for record in old.records()]
        checks = gate_of_nodes([name], old, expected=parse(["gpus=8,interface=eno1"]))
        assert {c.status for c in checks if c.code == EXPECT_CODES[0]} == {"unknown"}
        assert judge(checks).exit_code == 5


def test_the_agents_own_shared_memory_is_no_jobs() -> None:
    """shm of an agent's pod is unknown; memlock comes from the container engine and counts."""
    pod = changed(snapshot(), LimitsFacts, of_agent=True, shm_size_bytes=64 << 20)
    assert judged(pod, "shm=1GiB,memlock=unlimited") == {"shm=1GiB": "unknown", "memlock=unlimited": "pass"}


def test_a_hung_drivers_record_meets_no_number_of_gpus() -> None:
    """The bus still counts eight; none of them was read."""
    broken = with_outcomes(snapshot(), gpu=Failed(error="no answer"))
    checks = gate_of_nodes([broken.hostname], fleet_of(broken), expected=parse(["gpus=8"]))
    assert judge(checks).exit_code == 5


def test_as_many_as_expected_settle_what_a_scan_cannot_tell() -> None:
    """An uncabled port looks like a dead one, a GPU given to others like a lost one: the owner's number tells."""
    dead = snapshot("sick-h100-dead-hca")
    for words, status in (("hcas=9", "info"), ("hcas=10", "fail")):
        assert statuses(look((dead,), expected=parse([words])), "rdma.port.down") == {status}
    gpus = dead.facts(GpuFacts)
    assert gpus is not None and gpus.bus is not None
    bus = replace(gpus.bus, container="kubernetes", all_requested=True)
    pod = changed(dead, GpuFacts, gpus=gpus.gpus[:2], pairs=(), bus=bus)
    for words, status, required in (("gpus=2", "info", False), ("gpus=3", "unknown", True)):
        (check,) = of_code(look((pod,), expected=parse([words])), "gpu.device.not_given")
        assert (check.status, check.required) == (status, required)


def test_ports_whose_state_is_unknown_are_not_counted_as_down() -> None:
    """hcas with a port that could not be read: unknown."""
    rdma = snapshot().facts(RdmaFacts)
    assert rdma is not None
    unread = tuple(replace(d, ports=tuple(replace(p, state=None) for p in d.ports)) for d in rdma.devices)
    assert judged(changed(snapshot(), RdmaFacts, devices=unread), "hcas=8") == {"hcas=8": "unknown"}


def test_the_daemonset_reads_the_administrators_config_map(tmp_path: Path) -> None:
    """No manifest holds it, so that applying them again changes nothing of it; the documented file is understood."""
    documents = render(ROOT / "deploy/daemonset/base")
    assert not [d for d in documents if d["kind"] == "ConfigMap"]
    (daemonset,) = [d for d in documents if d["kind"] == "DaemonSet"]
    pod: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    page = (ROOT / "docs/how-to/deploy-kubernetes.md").read_text(encoding="utf-8")
    (name, file), *more = re.findall(r"create configmap (\S+) --from-file=(\S+)", page)
    assert not more
    (volume,) = [v for v in pod["volumes"] if v.get("configMap", {}).get("name") == name]
    assert volume["configMap"]["optional"] is True
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    assert f"{mount['mountPath']}/{file}" == container["args"][container["args"].index("--expect-file") + 1]
    (text,) = re.findall(rf"```yaml\n# {re.escape(file)}\n(.*?)```", page, re.S)
    (tmp_path / file).write_text(text)
    assert set(yaml.safe_load(text)) == set(KEYS) - {"shm"}, "shm is unknown to an agent"
    read_file(tmp_path / file)


# A host without a GPU ----------------------------------------------------------------------------------------------


@each_row("form", ["table", "github"])
def test_a_pass_without_a_gpu_says_so_in_its_first_line(form: str) -> None:
    """Whatever a pipeline reads first."""
    result = preflight("cpu-only-vm", "-o", form)
    assert result.exit_code == 0
    first = next(line for line in result.stdout.splitlines() if line.strip())
    assert "no GPU was checked" in first
    assert "no GPU was checked" not in preflight(H100, "-o", form).stdout


def test_a_pass_without_a_gpu_says_so_in_json_junit_and_over_several_hosts() -> None:
    """The verdict's own words, the name of the suites; of several hosts which."""
    said = json.loads(preflight("cpu-only-vm", "-o", "json").stdout)["verdict"]["why"]
    assert said.startswith("no GPU was checked; ")
    assert "no GPU was checked" in preflight("cpu-only-vm", "-o", "junit").stdout.splitlines()[1]
    both = look((snapshot(), snapshot("cpu-only-vm")))
    assert both.verdict.why.startswith("no GPU was checked on vm; ")
