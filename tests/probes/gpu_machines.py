"""What the tests of the gpu probe share: recordings to change, and the facts that are read of them."""

import copy
import dataclasses
import json
from functools import cache

from rigs.recorded import path_of
from scanned import scan

from probes.api import Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts, GpuProcess, NvLink
from probes.gpu.probe import PROBE
from probes.host.recording import RecordedHost

H100, GB200, TITAN = "hgx-h100-8xH100-8hca", "gb200-nvl72-tray", "titan-rtx-2x-nv2"


@cache
def recorded(name: str = H100) -> dict:
    """A recording, which no test changes."""
    content: dict = json.loads(path_of(name).read_text(encoding="utf-8"))
    return content


def changed(name: str = H100, **answers) -> dict:
    """A copy of it; `answers` of GPUs ("gpu3") replace those of one NVML function.

    The function's name may go on with arguments: {"gpu3": ("nvmlDeviceGetTotalEccErrors,1,0", 7)}. A dictionary
    replaces members of the recorded answer.
    """
    content = copy.deepcopy(recorded(name))
    for gpu, (question, answer) in answers.items():
        symbol, _, arguments = question.partition(",")
        known = content["answers"]["nvml"][symbol]
        key = f"{gpu},{arguments}" if arguments else next(key for key in known if key.split(",")[0] == gpu)
        assert key in known, sorted(known)[:3]
        known[key] = {**known[key], **answer} if isinstance(answer, dict) else answer
    return content


def facts_of(found: Snapshot | dict) -> GpuFacts:
    """The GPUs of a snapshot, or of a recording's content."""
    snapshot = scan(RecordedHost(found), (PROBE,)) if isinstance(found, dict) else found
    outcome = snapshot.outcomes["gpu"]
    assert isinstance(outcome, Ok), outcome
    facts = outcome.facts
    assert isinstance(facts, GpuFacts)
    return facts


def gpu_with(gpu: Gpu, changes: dict) -> Gpu:
    """The GPU with members as a table writes them."""
    made = {"nvlinks": NvLink, "processes": lambda pid: GpuProcess(pid=pid, memory_bytes=None)}
    words: dict = {}
    for name, value in changes.items():
        if name in made:
            words[name] = tuple(made[name](**row) for row in value)
        else:
            words[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(gpu, **words)
