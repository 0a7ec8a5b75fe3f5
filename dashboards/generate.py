"""Write the generated files: `python dashboards/generate.py` from the repository root.

Dashboards (Classic JSON), alert rules (plain and PrometheusRule), and the tables of docs/reference/metrics.md. All are
committed; a test checks that they are up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import alerts  # noqa: E402 - found by the path above

from agent.metrics import OWN, TABLE  # noqa: E402 - found by the path above
from probes.api import Metric  # noqa: E402
from probes.registry import ALL  # noqa: E402


def generate_files(docs: str = alerts.DOCS, grafana: str = alerts.GRAFANA, page: str | None = None) -> dict[str, str]:
    """Return the generated files: path below the repository root -> content. Alerts link to `docs`, `grafana`, `page`.

    `page` is an agent's address outside the cluster; None: the agent's address within the cluster.
    """
    import boards

    def rules(document: dict[str, Any]) -> str:
        text = format_yaml(document).replace(alerts.DOCS, docs.rstrip("/")).replace(alerts.GRAFANA, grafana.rstrip("/"))
        if page is None:
            return text
        at = "page_url: " + page.rstrip("/")
        example = f"{at}/cluster?node={alerts.HOST['node']}"  # the link of the fired alert in the tests
        return text.replace(f"page_url: {alerts.AGENT}/", at + alerts.NODE_PAGE).replace(
            f"page_url: http://{alerts.HOST['instance']}/", example
        )

    metrics = ROOT / "docs/reference/metrics.md"
    drawn = boards.make_boards()
    return {
        **{f"dashboards/{name}": text for name, text in drawn.items()},
        "deploy/monitoring/dashboards.yaml": make_config_maps(drawn),
        "docs/reference/metrics.md": update_metrics_page(metrics.read_text(encoding="utf-8")),
        "dashboards/rules.yaml": rules(alerts.rules(alerts.ALERTS)),
        "dashboards/rules_test.yaml": rules(alerts.make_rule_tests(alerts.ALERTS)),
        "deploy/monitoring/prometheusrule.yaml": rules(alerts.make_prometheus_rule(alerts.ALERTS)),
    }


def format_yaml(document: dict[str, Any]) -> str:
    """Return YAML with a comment that names this generator."""
    return "# Made by dashboards/generate.py; change dashboards/alerts.yaml.\n" + yaml.safe_dump(
        document, sort_keys=False, width=120, allow_unicode=True
    )


# ConfigMaps that Grafana's sidecar loads (label grafana_dashboard): one per dashboard.

NOTE = "# Made by dashboards/generate.py; change dashboards/boards.yaml.\n"


class _Literal(str):
    """Text that is written as a YAML block scalar, for readability."""


class _Dumper(yaml.SafeDumper):
    """Safe dumper that writes `_Literal` as a block scalar."""


def _represent_block(dumper: yaml.SafeDumper, data: _Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(data), style="|")


_Dumper.add_representer(_Literal, _represent_block)


def make_config_maps(drawn: Mapping[str, str]) -> str:
    """Return a ConfigMap per dashboard, as one YAML stream."""
    return NOTE + yaml.dump_all([_map(name, body) for name, body in drawn.items()], Dumper=_Dumper, sort_keys=False)


def _map(name: str, body: str) -> dict[str, Any]:
    stem = name.removesuffix(".json")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"topoflight-dashboard-{stem}",
            "labels": {"app.kubernetes.io/name": "topoflight", "grafana_dashboard": "1"},
            "annotations": {"grafana_folder": "Topoflight"},
        },
        "data": {f"topoflight-{name}": _Literal(body)},
    }


# docs/reference/metrics.md: the tables between the markers are generated from the metric families.

BY_SOURCE: dict[str, tuple[Metric, ...]] = {"agent": OWN, **{p.name: p.metrics for p in ALL if p.metrics}}
_COUNTED = {"probe": str(len(ALL)), "fact": str(len(ALL) + 3)}  # or the benchmark, the search, the run
LABELS: dict[str, tuple[str, str]] = {
    label: (row["text"], _COUNTED.get(label, row.get("most", ""))) for label, row in TABLE["labels"].items()
}
"""What each label holds, and the most values that one host has of it: a number, a symbol, or "" where the value follows
from the other labels."""

BEGIN, END = "<!-- made by dashboards/generate.py -->", "<!-- end of what is made -->"


def update_metrics_page(old: str) -> str:
    """Return the page with updated tables between the markers."""
    head, _, rest = old.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{_format_tables()}\n{END}{tail}"


def _format_tables() -> str:
    never = ", ".join(f"`{name}`" for name in sorted(TABLE["forbidden_labels"]))
    symbols = "; ".join(f"{symbol} {meaning}" for symbol, meaning in TABLE["symbols"].items())
    lines = ["## Families", ""]
    for source, families in BY_SOURCE.items():
        lines += [f"### {source}", "", *(_format_row(family) for family in families), ""]
    lines += [
        "## Labels", "",
        f"In brackets the most values on one host: {symbols}.", "",
        *(f"- `{name}`{f' ({count})' if count else ''}: {text}" for name, (text, count) in LABELS.items()),
        "", f"Never used, because they are the scraper's: {never}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _format_row(family: Metric) -> str:
    labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
    return f"- `{family.exposed}{labels}`: {family.help}"


def _address(text: str) -> str:
    """Return an absolute URL. Raises argparse.ArgumentTypeError for any other text."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no address that begins with http:// or https://")
    return text


def main() -> None:
    """Write the files that differ, and print their names."""
    parser = argparse.ArgumentParser(description="Write the dashboards, the alert rules and the tables of metrics.")
    parser.add_argument(
        "--docs", type=_address, default=alerts.DOCS, help="URL where the documentation site is published"
    )
    parser.add_argument("--grafana", type=_address, default=alerts.GRAFANA, help="where Grafana is")
    parser.add_argument("--page", type=_address, help="where agents are reached from outside (default: their address)")
    arguments = parser.parse_args()
    for name, text in generate_files(arguments.docs, arguments.grafana, arguments.page).items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stderr.write(f"{name}\n")


if __name__ == "__main__":
    main()
