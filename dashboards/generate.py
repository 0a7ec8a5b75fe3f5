"""Writes everything here that is made: `python dashboards/generate.py` from the repository root.

Dashboards (Classic JSON), alert rules (plain and PrometheusRule), and the tables of docs/metrics.md. All of it is
committed; a test holds that making it again gives no difference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]


def made() -> dict[str, str]:
    """Path below the repository root, and what belongs there."""
    import alert_rules
    import boards
    import config_maps
    import metrics_page
    from alerts import ALERTS

    metrics = ROOT / "docs" / "metrics.md"
    drawn = boards.made()
    return {
        **{f"dashboards/{name}": text for name, text in drawn.items()},
        "deploy/monitoring/dashboards.yaml": config_maps.text(drawn),
        "docs/metrics.md": metrics_page.page(metrics.read_text(encoding="utf-8")),
        "dashboards/rules.yaml": as_yaml(alert_rules.rules(ALERTS)),
        "dashboards/rules_test.yaml": as_yaml(alert_rules.rule_tests(ALERTS)),
        "deploy/monitoring/prometheusrule.yaml": as_yaml(alert_rules.prometheus_rule(ALERTS)),
    }


def as_yaml(document: dict[str, Any]) -> str:
    """YAML that names its maker."""
    return "# Made by dashboards/generate.py; change dashboards/alerts.py.\n" + yaml.safe_dump(
        document, sort_keys=False, width=120, allow_unicode=True
    )


def main() -> None:
    """Write what differs, and name it."""
    for name, text in made().items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stderr.write(f"{name}\n")


if __name__ == "__main__":
    main()
