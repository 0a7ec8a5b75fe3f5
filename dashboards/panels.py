"""Panels as data, and what grafana-foundation-sdk builds of them (Classic JSON, Grafana 10 to 13).

Variables and selectors follow grafana/dashboard-linter: `datasource`, `job` and `instance`, both in each selector.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import bargauge, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus as query
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, prometheus

SOURCE = common.DataSourceRef(type_val="prometheus", uid="$datasource")
KINDS = {
    "stat": stat.Panel, "timeseries": timeseries.Panel, "table": table.Panel, "matrix": table.Panel,
    "timeline": statetimeline.Panel, "bars": bargauge.Panel,
}  # fmt: skip
GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One expression and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel, and what a test may ask of it."""

    title: str
    description: str
    kind: str
    unit: str
    targets: tuple[Target, ...]
    width: int = 8
    height: int = 8
    steps: tuple[tuple[float | None, str], ...] = ((None, BLUE),)  # colour from this value on
    words: dict[str, tuple[str, str]] = field(default_factory=dict)  # value: (text, colour)
    rows: str = ""  # matrix: label of the rows
    columns: str = ""  # matrix: label of the columns
    quiet: bool = False  # may show nothing on a healthy node
    shows: tuple[str, ...] = ()  # recorded sick machines that it must tell from a healthy one


def target(expr: str, legend: str = "") -> Target:
    """A target, shortly."""
    return Target(expr=expr, legend=legend)


def m(name: str, **matchers: str) -> str:
    """A metric of the chosen agents; a matcher is an operator and a value, such as status="=fail"."""
    said = [re.fullmatch(r"(=~|!~|!=|=)(.*)", text) for text in matchers.values()]
    more = [f'{label}{each[1]}"{each[2]}"' for label, each in zip(matchers, said, strict=True) if each]
    inner = ", ".join(('job=~"$job"', 'instance=~"$instance"', *more))
    return f"{name}{{{inner}}}"


def board(uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> str:
    """The dashboard's JSON."""
    made = (
        build.Dashboard(title).uid(uid).description(description).tags(["topoflight"]).readonly()
        .time("now-6h", "now").timezone("browser").refresh("1m").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    )  # fmt: skip
    for variable in _variables():
        made.with_variable(variable)
    made.link(
        build.DashboardLink("Topoflight").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["topoflight"])
        .as_dropdown(True).include_vars(True).keep_time(True).icon("external link").tooltip("").url("")
    )  # fmt: skip
    number = 1
    for name, panels in rows:
        made.with_row(build.Row(name).id(number))
        number += 1
        for panel in panels:
            made.with_panel(_panel(panel).id(number))
            number += 1
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1, sort_keys=True) + "\n"


def _variables() -> list[Any]:
    everything = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
    first = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    found: list[Any] = [first]
    for name, text in (
        ("job", "label_values(topoflight_build_info, job)"),
        ("instance", 'label_values(topoflight_build_info{job=~"$job"}, instance)'),
    ):
        found.append(
            build.QueryVariable(name).label(name).datasource(SOURCE).query({"query": text, "refId": name})
            .definition(text).multi(True).include_all(True).all_value(".+").current(everything)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        )  # fmt: skip
    return found


def _panel(panel: Panel) -> Any:
    made = KINDS[panel.kind]().title(panel.title).description(panel.description).datasource(SOURCE)
    made.unit(panel.unit).span(panel.width).height(panel.height)
    steps = [dashboard.Threshold(value=value, color=color) for value, color in panel.steps]
    made.thresholds(build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.words:
        made.mappings([_mapping(panel.words)])
    for place, one in enumerate(panel.targets):
        made.with_target(_target(panel, one, "ABCDEFGH"[place]))
    if panel.kind in ("table", "matrix"):
        _as_table(made, panel)
    elif panel.kind == "timeseries":
        made.min(0).line_width(1).fill_opacity(8).legend(
            common_builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM).calcs(["lastNotNull"])
        )  # fmt: skip
    elif panel.kind == "stat":
        made.color_mode(common.BigValueColorMode.BACKGROUND).graph_mode(common.BigValueGraphMode.NONE)
    if panel.kind in ("timeline", "stat", "bars"):
        made.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
    return made


def _mapping(words: dict[str, tuple[str, str]]) -> dashboard.ValueMap:
    return dashboard.ValueMap(
        options={
            value: dashboard.ValueMappingResult(text=text, color=color, index=place)
            for place, (value, (text, color)) in enumerate(words.items())
        }
    )


def _target(panel: Panel, one: Target, letter: str) -> Any:
    made = query.Dataquery().expr(one.expr).ref_id(letter).datasource(SOURCE)
    if panel.kind in ("table", "matrix", "stat", "bars"):
        made.instant()
    else:
        made.range()
    if panel.kind in ("table", "matrix"):
        return made.format(prometheus.PromQueryFormat.TABLE)
    return made.legend_format(one.legend or "{{instance}}")


def _as_table(made: Any, panel: Panel) -> None:
    """A table; a matrix has one row and column per label value and its cells in the colour of their value."""
    if panel.kind == "matrix":
        options = {"rowField": panel.rows, "columnField": panel.columns, "valueField": "Value"}
        made.with_transformation(dashboard.DataTransformerConfig(id_val="groupingToMatrix", options=options))
        made.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        made.cell_options(common.TableColoredBackgroundCellOptions())
        made.align(common.FieldTextAlignment.CENTER)
        return
    hidden: dict[str, bool] = {"Time": True, "__name__": True, "job": True}
    if len(panel.targets) == 1 and "_info" in panel.targets[0].expr:
        hidden["Value"] = True
    options = {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}
    made.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=options))
