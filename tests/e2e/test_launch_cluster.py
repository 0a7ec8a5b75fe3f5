"""launch --api creates the job through the API; the same against a real server where its CRDs are installed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer, write_kubeconfig
from click.testing import CliRunner
from e2e_client import MACHINES, client_of

from agent import cluster_job
from agent.advise import Request, answer
from agent.cmd_preflight import launch
from agent.hosts import snapshots
from planner.job import JobError

H100 = next(MACHINES.glob("hgx-h100*.json"))
GIVEN = {
    "image": "registry.example/finetune:1", "namespace": "default", "nodes": 2, "resources": (), "node_selector": (),
    "tolerate": (), "claim": None, "queue": None, "topology": None, "service_account": None, "preflight_image": None,
    "require": (), "dra": False,
}  # fmt: skip


def documents(kind: str, name: str) -> tuple[dict[str, object], ...]:
    found = snapshots([H100])
    advice = answer(Request(hosts=(H100,), model="Llama-3.1-8B", nodes=2), found)
    return cluster_job.documents(advice, cluster_job.spec_of(advice, {**GIVEN, "name": name}), kind, None)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "job"])
def test_a_dry_run_judges_every_object_and_creates_none(api: ApiServer, kind: str) -> None:
    """A real server's judgement is in test_real_jobs."""
    lines = list(cluster_job.create(client_of(api), documents(kind, f"e2e-{uuid.uuid4().hex[:8]}"), dry_run=True))
    assert lines and all(line.endswith("admitted (dry run)") for line in lines)
    assert api.of_kind("Job") == api.of_kind("TrainJob") == api.of_kind("PyTorchJob") == api.of_kind("ConfigMap") == []


def test_a_job_that_exists_is_not_overwritten(api: ApiServer) -> None:
    """And the error says that nothing was made."""
    client = client_of(api)
    assert len(list(cluster_job.create(client, documents("trainjob", "sft")))) == 3
    with pytest.raises(JobError, match=r"trainjob/sft: the API server says 409.*nothing was made"):
        list(cluster_job.create(client, documents("trainjob", "sft")))


@pytest.fixture
def kubeconfig(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", api.url)))
    yield api


WORDS = ["--host", str(H100), "--model", "Llama-3.1-8B", "--nodes", "2", "--image", "registry.example/f:1"]


def test_the_verb_creates_what_the_dry_run_prints(kubeconfig: ApiServer) -> None:
    """ConfigMap with the plan, runtime, job."""
    done = CliRunner().invoke(launch, [*WORDS, "--api", "trainjob", "--name", "sft"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "trainjob/sft created"
    (config,) = kubeconfig.of_kind("ConfigMap")
    assert "plan.json" in config["data"]
    (job,) = kubeconfig.of_kind("TrainJob")
    assert job["spec"]["trainer"]["numNodes"] == 2


def test_a_refusal_is_told_in_the_servers_words(kubeconfig: ApiServer) -> None:
    """Exit code 1, and which object."""
    kubeconfig.faults = [(403, {})]
    done = CliRunner().invoke(launch, [*WORDS, "--api", "job", "--name", "sft"])
    assert done.exit_code == 1
    assert "configmap/sft-config: the API server says 403" in done.output


def test_an_unknown_context_is_named(kubeconfig: ApiServer) -> None:
    """A typing error in --context."""
    done = CliRunner().invoke(launch, [*WORDS, "--api", "job", "--context", "nowhere"])
    assert done.exit_code == 1 and "no context named 'nowhere'" in done.output
