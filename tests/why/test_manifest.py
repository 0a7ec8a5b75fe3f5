"""What `why` reads in a manifest: settings that cost, their price, and the forecast without them."""

from __future__ import annotations

from pathlib import Path

from agent.why import diagnosis as gathered
from planner.why import Verdict

GPUS = "              resources: {limits: {nvidia.com/gpu: 2}}\n"
JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: sft
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template:
        spec:
          containers:
            - name: pytorch
              # what was tried
              env:
                # off, for a test
                - name: NCCL_P2P_DISABLE
                  value: "1"
              envFrom:
                - configMapRef: {name: nccl}
              args: ["bash", "-c", "NCCL_SHM_DISABLE=1 torchrun train.py"]
"""


def verdict(path: Path) -> Verdict:
    return gathered.answer(gathered.WhySources(manifest=path))


def test_a_configmap_of_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    found = verdict(path)
    assert any("ConfigMap nccl" in one.what and "kubectl get configmap nccl" in one.command for one in found.unknown)
