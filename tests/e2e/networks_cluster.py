"""A stand-in API server on which each job of compare-networks ends at once and leaves a record of its run."""

from pathlib import Path

from api_server import ApiServer, Json

from contracts import run_record
from contracts.job_config import JobPlan, RunForecast, read_plan
from contracts.run_record import Measured, NcclChannels, RunRecord
from finetune.post import write_termination_message


class Networks(ApiServer):
    """Pod 0 of job PREFIX-NETWORK leaves a record over `takes`, by default over the network that its job names."""

    def __init__(
        self, folder: Path, prefix: str, seconds: dict[str, float], forecast: RunForecast | None = None
    ) -> None:
        super().__init__()
        self.folder, self.prefix = folder, prefix
        self.seconds = seconds  # of a step, by network
        self.forecast = forecast  # without it the one of the job's own plan
        self.takes: dict[str, str] = {}
        self.condition: Json = {"type": "Complete"}

    def put(self, collection: str, namespace: str, document: Json) -> Json:
        """As a controller and a kubelet would have it."""
        prefix, _, rest = document["metadata"]["name"].partition("-")
        kind, network = document.get("kind"), rest.partition("-")[0]
        if prefix == self.prefix and kind == "ConfigMap":
            (self.folder / f"{network}.json").write_text(document["data"]["plan.json"])
        if prefix == self.prefix and kind in ("Job", "PyTorchJob"):
            document["status"] = {"conditions": [{**self.condition, "status": "True"}]}
        if prefix == self.prefix and kind == "Pod" and rest.endswith("-0"):
            ended = {"exitCode": 0, "message": self.message_of(network)}
            document["status"] = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
        return super().put(collection, namespace, document)

    def message_of(self, network: str) -> str:
        """What finetune.pod leaves of a run, in its own words."""
        taken = self.takes.get(network, network)
        seen: dict = {"transports": ["NET/Socket/0"], "nccl": NcclChannels(interfaces=[taken])}
        if taken == "rdma":
            seen = {"transports": ["NET/IB/0/GDRDMA"], "nccl": NcclChannels(interfaces=[])}
        record = RunRecord(
            status="complete", steps_done=30, measured=Measured(step_seconds=self.seconds[network], counted_steps=28),
            plan=JobPlan(forecast=self.forecast or read_plan(self.folder / f"{network}.json").forecast), **seen,
        )  # fmt: skip
        run_record.save(self.folder / "run.json", record)
        write_termination_message(self.folder / "run.json", self.folder / "word")
        text = (self.folder / "word").read_text()
        assert len(text.encode()) <= 4096
        return text
