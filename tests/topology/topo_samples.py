"""Matrices in the shapes that nvidia-smi, a terminal or a document gives them, and topologies of recorded machines."""

from functools import cache
from pathlib import Path

import yaml
from rigs.recorded import snapshot

from topology.build import build
from topology.graph import NodeTopology

ALL: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FOUR_GPUS_TWO_NICS, OLD_SOC = ALL["four GPUs, two NICs by legend"], ALL["old SOC words"]
NVSWITCH8 = ALL["eight GPUs behind NVSwitch"]


@cache
def topology(name: str) -> NodeTopology:
    """One recording's topology."""
    return build(snapshot(name))
