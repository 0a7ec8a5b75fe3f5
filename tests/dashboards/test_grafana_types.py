"""The committed dashboards against Grafana's own types of four major releases, by the TypeScript compiler.

Specification: npm's @grafana/schema, the types that Grafana generates from its schemas of dashboards and panels. No
Grafana is to be had from Debian, PyPI or npm: this is as near as its own definition of the format comes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rigs.packages import npm_installed

pytestmark = pytest.mark.prometheus  # the tier of the dashboards

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BOARDS = {path.stem: path for path in sorted((ROOT / "dashboards").glob("*.json"))}
RELEASES = (10, 11, 12, 13)
PANELS = {"timeseries": "timeseries", "stat": "stat", "table": "table", "state-timeline": "statetimeline",
          "bargauge": "bargauge"}  # fmt: skip
ENUM = re.compile(r"((?:export )?)(?:declare )?enum (\w+) \{(.*?)\n\}", re.DOTALL)
# Members that some release does not know, and so passes over; every other member must be known to all of them.
LINKS = {"placement"}  # from 12 on
VARIABLES = {
    "allowCustomValue",  # from 11 on
    "auto", "auto_count", "auto_min",  # of interval variables, which these are not: the SDK writes them for all
    "definition",  # of query variables: read by every release, in the types of none
}  # fmt: skip
# Of Prometheus' annotations (the data source's own, in its types and not in the dashboard's), and placement from 12 on.
ANNOTATIONS = {"expr", "step", "tagKeys", "textFormat", "titleFormat", "useValueForTime", "placement"}
OPTIONS = {
    "stat": {"percentChangeColorMode"}, "state-timeline": {"perPage"}, "bargauge": {"legend"},  # from 11 on
    "table": {"footer"},  # up to 11
}  # fmt: skip


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The types, their enums written as unions of the values that stand in JSON."""
    folder = tmp_path_factory.mktemp("grafana")
    source = npm_installed(HERE / "grafana", "grafana")
    (folder / "node_modules").mkdir()
    for release in RELEASES:
        name = f"grafana-schema-{release}"
        wanted = shutil.ignore_patterns("*.js", "*.cjs", "*.mjs", "*.map", "*.json")
        shutil.copytree(source / name / "dist", folder / "node_modules" / name, ignore=wanted)
        for path in (folder / "node_modules" / name).rglob("*.d.*ts"):
            text = path.read_text(encoding="utf-8")
            path.write_text(ENUM.sub(_union, text), encoding="utf-8")
    return folder


def _union(found: re.Match[str]) -> str:
    values = re.findall(r"=\s*(\"[^\"]*\"|-?\d+)", re.sub(r"/\*.*?\*/", "", found[3], flags=re.DOTALL))
    return f"{found[1]}type {found[2]} = {' | '.join(values)};"


def first(folder: Path, *places: str) -> Path:
    """The first that exists: the packages were laid out anew twice."""
    return next(path for place in places for path in sorted(folder.glob(place)))


def module(path: Path, folder: Path) -> str:
    return json.dumps(f"./{path.relative_to(folder)}".removesuffix(".d.ts"))


def check(folder: Path, release: int, boards: dict[str, dict[str, Any]]) -> list[str]:
    """What the compiler says against these documents."""
    dist = folder / "node_modules" / f"grafana-schema-{release}"
    board = first(dist, "types/raw/dashboard/x/types.gen.d.ts", "esm/raw/dashboard/x/dashboard_types.gen.d.ts")
    lines = [f"import type {{ Dashboard }} from {module(board, folder)};"]
    for name in PANELS.values():
        cfg = first(dist, f"types/raw/composable/{name}/panelcfg/x/types.gen.d.ts",
                    f"esm/raw/composable/{name}/panelcfg/x/*PanelCfg_types.gen.d.ts")  # fmt: skip
        lines.append(f"import type * as {name} from {module(cfg, folder)};")
    for stem, document in boards.items():
        lines.append(f"export const {stem}: Dashboard = {json.dumps(document)};")
        for panel in document["panels"]:
            kind, number = PANELS.get(panel["type"]), f"{stem}{panel['id']}"
            if kind is None:
                assert panel["type"] == "row", panel["type"]
                continue
            lines.append(f"export const o{number}: Partial<{kind}.Options> = {json.dumps(panel.get('options', {}))};")
            if custom := panel["fieldConfig"]["defaults"].get("custom"):
                lines.append(f"export const f{number}: Partial<{kind}.FieldConfig> = {json.dumps(custom)};")
    (folder / f"boards-{release}.ts").write_text("\n".join(lines), encoding="utf-8")
    index = first(dist, "types/index.d.ts", "cjs/index.d.cts", "index.d.ts")
    options = {
        "strict": True, "noEmit": True, "skipLibCheck": True, "module": "esnext", "moduleResolution": "bundler",
        "types": [], "lib": ["es2022", "dom"], "paths": {"@grafana/schema": [f"./{index.relative_to(folder)}"]},
    }  # fmt: skip
    project = folder / f"tsconfig-{release}.json"
    project.write_text(json.dumps({"compilerOptions": options, "files": [f"boards-{release}.ts"]}))
    compiler = npm_installed(HERE / "grafana", "grafana") / ".bin" / "tsc"
    done = subprocess.run([compiler, "-p", project], cwd=folder, capture_output=True, text=True, timeout=600)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert (done.returncode == 0) == (not said)
    return said


def known(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what some release passes over."""
    panels = [
        {**panel, "options": without(panel["options"], OPTIONS.get(panel["type"], set()))}
        if "options" in panel
        else panel
        for panel in document["panels"]
    ]
    variables = [without(variable, VARIABLES) for variable in document["templating"]["list"]]
    links = [without(link, LINKS) for link in document["links"]]
    marks = {"list": [without(each, ANNOTATIONS) for each in document["annotations"]["list"]]}
    return {**document, "panels": panels, "links": links, "templating": {"list": variables}, "annotations": marks}


def without(value: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in names}


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_reads_the_dashboards(modules: Path, release: int) -> None:
    """Each member is known to Grafana's own types, with the right type, down to panel options and fields."""
    documents = {stem: known(json.loads(path.read_text())) for stem, path in BOARDS.items()}
    assert check(modules, release, documents) == []
