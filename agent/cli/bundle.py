"""The verb bundle."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent.base.inputs import OUTPUT_FILE_OR_STDOUT
from agent.base.options import root_option
from agent.base.output import say, waiting, write_result


@click.command()
@root_option
@click.option("-f", "--file", "target", default="bundle.tgz", show_default=True, type=OUTPUT_FILE_OR_STDOUT,
              help="Write here; - for stdout.")  # fmt: skip
@click.option("--state", default="/var/lib/topoflight", show_default=True, envvar="TOPOFLIGHT_STATE",
              type=click.Path(path_type=Path), help="The agent's folder.")  # fmt: skip
@click.option("--cluster", is_flag=True, help="Of every node that has an agent, with what kubectl may do.")
@click.option("--node", "nodes", multiple=True, help="With --cluster: only this node; repeat for several.")
@click.option("-n", "--namespace", default="topoflight", show_default=True, help="With --cluster: of the agents.")
@click.option("--context", default=None, help="With --cluster: the kubeconfig's context.")
def bundle(
    root: str, target: str, state: Path, cluster: bool, nodes: tuple[str, ...], namespace: str, context: str | None
) -> None:
    """Write one file for whoever helps: recording, findings, versions, limits, kubelet's account, logs.

    Values that look like secrets are left out. `--host bundle.tgz` replays it in every verb. Nothing is sent anywhere.
    """
    from agent.base import bundle_file
    from agent.jobs import bundle as making

    if nodes and not cluster:
        raise click.UsageError("--node goes with --cluster")
    try:
        if cluster:
            with waiting("bundle: asking the agents"):
                hosts = making.of_cluster(namespace, context, nodes)
        else:
            from probes.scanner import capture

            with waiting("bundle: asking this host"):
                recording = capture(root)
            hosts = {str(recording["hostname"]): making.of_host(recording, root=root, state=state)}
        content = bundle_file.packed(hosts)
    except bundle_file.BundleError as error:
        raise click.ClickException(str(error)) from None
    if target == "-":
        sys.stdout.buffer.write(content)
        return
    write_result(Path(target), content, 0o600)
    failed = [name for name, files in hosts.items() if "error.txt" in files]
    failures = f"; {len(failed)} without an answer: {', '.join(failed)}" if failed else ""
    say(
        f"{target}: {len(content)} bytes, {len(hosts)} folders{failures}. Look into it before you hand it on.", err=True
    )
    for line in bundle_file.brief(hosts):
        say(line, err=True)
