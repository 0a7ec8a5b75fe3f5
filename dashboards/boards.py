"""Build the three dashboards as Grafana's JSON: Cluster; Node; Preflight and Runs.

boards.yaml lists the panels, their expressions, and the faults that each must show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import (
    bargauge,
    common as common_builders,
    dashboard as build,
    prometheus as query,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard, prometheus

SOURCE = common.DataSourceRef(type_val="prometheus", uid="$datasource")
KINDS = {
    "stat": stat.Panel, "timeseries": timeseries.Panel, "table": table.Panel, "matrix": table.Panel,
    "timeline": statetimeline.Panel, "bars": bargauge.Panel,
}  # fmt: skip
CHOSEN = ('job=~"$job"', 'instance=~"$instance"')
ORANGE, BLUE = "orange", "blue"
_METRIC = re.compile(r"\b(topoflight_\w+|up)\b(?:\{([^}]*)\})?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel, and the properties that tests check."""

    title: str
    description: str
    kind: str
    unit: str
    targets: tuple[Target, ...]
    width: int = 8
    height: int = 8
    steps: Sequence[Sequence[Any]] = ((None, BLUE),)  # thresholds: a value and the colour from this value upwards
    words: dict[str, list[str]] = field(default_factory=dict)  # value -> text and colour
    rows: str = ""  # matrix: label whose values are the rows
    columns: str = ""  # matrix: label whose values are the columns
    quiet: bool = False  # may be empty on a healthy node
    shows: Sequence[str] = ()  # recorded sick machines (tests/machines) that must look different from a healthy one


def select_agents(expr: str) -> str:
    """Return the expression with `up` and all `topoflight_` metrics limited to the agents selected by the variables."""
    return _METRIC.sub(lambda match: f"{match[1]}{{{', '.join(filter(None, (*CHOSEN, match[2])))}}}", expr)


def make_board(uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> str:
    """Return the JSON of a dashboard."""
    board = (
        build.Dashboard(title).uid(uid).description(description).tags(["topoflight"]).readonly()
        .time("now-6h", "now").timezone("browser").refresh("1m").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    )  # fmt: skip
    for variable in _make_variables():
        board.with_variable(variable)
    board.annotation(_marks("Findings", ORANGE, "topoflight_finding_since_seconds", "code", "severity"))
    board.annotation(_marks("Changes", BLUE, "topoflight_change_timestamp_seconds", "kind", "kind", " changed"))
    board.link(
        build.DashboardLink("Topoflight").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["topoflight"])
        .as_dropdown(True).include_vars(True).keep_time(True).icon("external link").tooltip("").url("")
    )  # fmt: skip
    number = 1
    for name, panels in rows:
        board.with_row(build.Row(name).id(number))
        number += 1
        for panel in panels:
            board.with_panel(_make_panel(panel).id(number))
            number += 1
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(board.build())), indent=1, sort_keys=True) + "\n"


def _marks(name: str, colour: str, metric: str, title: str, tag: str, suffix: str = "") -> build.AnnotationQuery:
    """Return an annotation query: the metric's values are times; labels give title and tag."""
    labels = ", ".join(dict.fromkeys(("node", "instance", title, tag)))
    return (
        build.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
        .expr(f"max by ({labels}) ({select_agents(metric)}) * 1000").use_value_for_time("on").step("60s")
        .title_format(f"{{{{{title}}}}}").tag_keys(tag)
        .text_format(f"{{{{node}}}} {{{{instance}}}}: {{{{{tag}}}}}{suffix}")
    )  # fmt: skip


def _make_variables() -> list[Any]:
    everything = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
    first = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    variables: list[Any] = [first]
    for name, text in (
        ("job", "label_values(topoflight_build_info, job)"),
        ("instance", 'label_values(topoflight_build_info{job=~"$job"}, instance)'),
    ):
        variables.append(
            build.QueryVariable(name).label(name).datasource(SOURCE).query({"query": text, "refId": name})
            .definition(text).multi(True).include_all(True).all_value(".+").current(everything)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        )  # fmt: skip
    return variables


def _make_panel(panel: Panel) -> Any:
    result = KINDS[panel.kind]().title(panel.title).description(panel.description).datasource(SOURCE)
    result.unit(panel.unit).span(panel.width).height(panel.height)
    steps = [dashboard.Threshold(value=value, color=color) for value, color in panel.steps]
    result.thresholds(build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.words:
        result.mappings([_make_mapping(panel.words)])
    for place, one in enumerate(panel.targets):
        result.with_target(_make_target(panel, one, "ABCDEFGH"[place]))
    if panel.kind in ("table", "matrix"):
        _format_table(result, panel)
    elif panel.kind == "timeseries":
        result.min(0).line_width(1).fill_opacity(8).legend(
            common_builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM).calcs(["lastNotNull"])
        )  # fmt: skip
    elif panel.kind == "stat":
        result.color_mode(common.BigValueColorMode.BACKGROUND).graph_mode(common.BigValueGraphMode.NONE)
    if panel.kind in ("timeline", "stat", "bars"):
        result.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
    return result


def _make_mapping(words: dict[str, list[str]]) -> dashboard.ValueMap:
    return dashboard.ValueMap(
        options={
            value: dashboard.ValueMappingResult(text=text, color=color, index=place)
            for place, (value, (text, color)) in enumerate(words.items())
        }
    )


def _make_target(panel: Panel, one: Target, letter: str) -> Any:
    result = query.Dataquery().expr(one.expr).ref_id(letter).datasource(SOURCE)
    if panel.kind in ("table", "matrix", "stat", "bars"):
        result.instant()
    else:
        result.range()
    if panel.kind in ("table", "matrix"):
        return result.format(prometheus.PromQueryFormat.TABLE)
    return result.legend_format(one.legend or "{{instance}}")


def _format_table(result: Any, panel: Panel) -> None:
    """Format a panel as table; a matrix has a row and a column per label value, and cells coloured by value."""
    if panel.kind == "matrix":
        options = {"rowField": panel.rows, "columnField": panel.columns, "valueField": "Value"}
        result.with_transformation(dashboard.DataTransformerConfig(id_val="groupingToMatrix", options=options))
        result.color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        result.cell_options(common.TableColoredBackgroundCellOptions())
        result.align(common.FieldTextAlignment.CENTER)
        return
    hidden: dict[str, bool] = {"Time": True, "__name__": True, "job": True}
    if len(panel.targets) == 1 and "_info" in panel.targets[0].expr:
        hidden["Value"] = True
    options = {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}
    result.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=options))


def _read_panel(row: dict[str, Any]) -> Panel:
    """Return the panel of a row of boards.yaml, whose `targets` map an expression to its legend."""
    targets = tuple(Target(expr=select_agents(expr), legend=legend) for expr, legend in row["targets"].items())
    return Panel(**{**row, "targets": targets})


_TABLE = yaml.safe_load(Path(__file__).with_name("boards.yaml").read_text(encoding="utf-8"))
BOARDS = {
    one["name"]: (
        one["uid"], one["title"], one["description"],
        [(row["title"], [_read_panel(panel) for panel in row["panels"]]) for row in one["rows"]],
    )
    for one in _TABLE["boards"]
}  # fmt: skip


def make_boards() -> dict[str, str]:
    """Return the JSON of each dashboard by its file name below dashboards/."""
    return {f"{name}.json": make_board(*parts) for name, parts in BOARDS.items()}


def list_panels() -> list[tuple[str, Panel]]:
    """Return every panel with the name of its dashboard."""
    return [(name, panel) for name, (*_, rows) in BOARDS.items() for _, row in rows for panel in row]
