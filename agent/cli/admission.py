"""The verb admission."""

from __future__ import annotations

import signal

import click


@click.command()
@click.option("--controller", default="topoflight.io/preflight", show_default=True,
              help="spec.controllerName of the AdmissionChecks to answer.")  # fmt: skip
@click.option("--requeue", default=60, show_default=True, type=click.IntRange(1, 86400),
              help="Seconds until a workload whose nodes have not passed is tried again.")  # fmt: skip
@click.option("--reject-after", default=None, type=click.IntRange(0),
              help="Retries after which a workload is rejected. Default: never.")  # fmt: skip
@click.option("--confine", is_flag=True,
              help="Confine pods to nodes labelled topoflight.io/ready=true; needs NFD.")  # fmt: skip
@click.option("--context", default=None, help="The kubeconfig's context. Default: the pod's service account.")
def admission(controller: str, requeue: int, reject_after: int | None, confine: bool, context: str | None) -> None:
    """Answer Kueue's AdmissionChecks from what the nodes' agents publish. Optional; runs in the cluster."""
    from agent.cluster.admission import Controller, Policy
    from agent.cluster.client import AccessError, connect

    try:
        client = connect(context)
    except AccessError as error:
        raise click.ClickException(str(error)) from None
    policy = Policy(requeue_seconds=requeue, reject_after=reject_after, confine=confine)
    running = Controller(client, policy, controller=controller)
    signal.signal(signal.SIGTERM, lambda *_: running.stop())
    running.run()
