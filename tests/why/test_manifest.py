"""What `why` reads in a manifest: settings that cost, their price, and the forecast without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rigs.tables import each_row

from agent.advice.request import Request
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
    return gathered.answer(gathered.Asked(manifest=path))


def test_a_configmap_of_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    found = verdict(path)
    assert any("ConfigMap nccl" in one.what and "kubectl get configmap nccl" in one.command for one in found.unknown)


def test_the_forecast_of_the_manifests_own_job_after_the_change(tmp_path: Path) -> None:
    arguments = "[torchrun, sft.py, --model_name_or_path, meta-llama/Llama-3.1-8B, --use_peft, 'true']"
    text = JOB.replace('["bash", "-c", "NCCL_SHM_DISABLE=1 torchrun train.py"]', arguments)
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("              args:", f"{GPUS}              args:"))
    told = gathered.answer(gathered.Asked(manifest=path, request=Request.of(machine="2xa40-roce")))
    assert told.forecast.startswith("after the change a step of PyTorchJob/sft takes"), told.unknown
    unknown = verdict(path)
    assert unknown.forecast == ""
    assert any(one.what == "the forecast after the change" for one in unknown.unknown)


@each_row(
    ("machine", "words"),
    [
        ("2xa40-roce", "with RDMA over net1 of the manifest's networks: "),
        ("p5.48xlarge", "after the change a step takes "),
    ],
)
def test_a_manifest_alone_has_a_price_and_a_forecast(tmp_path: Path, machine: str, words: str) -> None:
    """Its settings keep NCCL off RDMA, but for a machine whose network has a plugin; its selector names the machine."""
    text = f"""kind: Pod
apiVersion: v1
metadata: {{name: a, annotations: {{k8s.v1.cni.cncf.io/networks: rdma-net}}}}
spec:
  nodeSelector: {{node.kubernetes.io/instance-type: {machine}}}
  containers:
  - name: pytorch
    image: x
    command: [torchrun, train.py]
    env:
    - {{name: NCCL_IB_DISABLE, value: "1"}}
    - {{name: NCCL_SOCKET_IFNAME, value: eth0}}
    resources: {{limits: {{nvidia.com/gpu: 2}}}}
"""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    request = Request.of(model="Llama-3.1-8B", nodes=2, network="8.4G", steps=100, price="10")
    told = gathered.answer(gathered.Asked(manifest=path, request=request))
    assert told.forecast.startswith(words), told.unknown
    price = told.causes[0].price
    assert ("TCP over eth0 (8.4G) instead of RDMA over net1" in price) is (machine == "2xa40-roce"), price
    assert ("of your prices" in price) is (machine == "2xa40-roce")
    script = tmp_path / "job.sh"
    script.write_text("export NCCL_IB_DISABLE=1\ntorchrun train.py\n")
    alone = gathered.answer(gathered.Asked(manifest=script, request=replace(request, machine=machine)))
    assert alone.forecast.startswith(words.partition(" over")[0]), alone
