"""Matrices in the shapes that nvidia-smi, a terminal or a document gives them, and topologies of recorded machines."""

from functools import cache

from rigs.recorded import snapshot
from rigs.tables import data_of

from topology.build import build
from topology.graph import NodeTopology

ALL: dict[str, str] = data_of(__file__, "topo_samples.yaml")
FOUR_GPUS_TWO_NICS, OLD_SOC = ALL["four GPUs, two NICs by legend"], ALL["old SOC words"]
NVSWITCH8 = ALL["eight GPUs behind NVSwitch"]


@cache
def topology(name: str) -> NodeTopology:
    """One recording's topology."""
    return build(snapshot(name))
