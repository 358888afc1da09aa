"""Writes the dashboards that `dashboard_panels.py` describes, for Grafana and for Perses:

    python deploy/write_dashboards.py [--prefix vllm] [--out FOLDER]

`--prefix` is the server's `--metrics-prefix`: names of metrics cannot be a variable of a dashboard.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dashboard_panels import ROWS, VARIABLES, Panel, Unit, Variable

__all__ = ["grafana_dashboard", "perses_dashboard", "write_dashboards"]

_SELECTOR = ",".join(f'{variable.label}=~"${variable.name}"' for variable in VARIABLES)
_INTERVAL = "[$__rate_interval]"
_NUM_COLUMNS = 24
_PANEL_HEIGHT = 8
_STAT_HEIGHT = 4
_UNITS: dict[Unit, tuple[str, str]] = {
    "count": ("short", "decimal"),
    "tokens": ("short", "decimal"),
    "per second": ("reqps", "requests/sec"),
    "tokens per second": ("suffix: tokens/s", "decimal"),
    "seconds": ("s", "seconds"),
    "share": ("percentunit", "percent-decimal"),
}
"""Unit -> its names in Grafana and in Perses, which has none of tokens."""


def promql(expression: str, prefix: str) -> str:
    """An expression of the description as Prometheus takes it, with the variables of the dashboard in it."""
    return re.sub(r"@(\w+)", rf"{prefix}:\1{{{_SELECTOR}}}", expression).replace("[R]", _INTERVAL)


def places(panels: tuple[Panel, ...], y: int) -> Iterator[tuple[Panel, dict[str, int]]]:
    """Each panel with its place, three (numbers: six) beside each other, from line `y` on."""
    x = 0
    for panel in panels:
        width, height = (_NUM_COLUMNS // 6, _STAT_HEIGHT) if panel.is_stat else (_NUM_COLUMNS // 3, _PANEL_HEIGHT)
        if x + width > _NUM_COLUMNS:
            x, y = 0, y + height
        yield panel, {"x": x, "y": y, "width": width, "height": height}
        x += width


def grafana_dashboard(prefix: str) -> dict[str, Any]:
    """The dashboard as Grafana (11 and later) imports and provisions it."""
    panels: list[dict[str, Any]] = []
    y = panel_id = 0
    for row in ROWS:
        inside: list[dict[str, Any]] = []
        panel_id += 1
        heading = {
            "id": panel_id,
            "type": "row",
            "title": row.title,
            "collapsed": row.is_collapsed,
            "gridPos": {"x": 0, "y": y, "w": _NUM_COLUMNS, "h": 1},
            "panels": inside if row.is_collapsed else [],
        }
        y += 1
        bottom = y
        for panel, place in places(row.panels, y):
            panel_id += 1
            inside.append(_grafana_panel(panel, place, panel_id, prefix))
            bottom = place["y"] + place["height"]
        panels += [heading] if row.is_collapsed else [heading, *inside]
        y = y if row.is_collapsed else bottom
    return {
        "uid": f"{prefix}-engine",
        "title": _title(prefix),
        "tags": ["llm", "quire"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_GRAFANA_SOURCE, *(_grafana_variable(each, prefix) for each in VARIABLES)]},
        "panels": panels,
    }


_GRAFANA_SOURCE = {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus", "hide": 0}
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _title(prefix: str) -> str:
    return "Quire" if prefix == "quire" else f"Quire ({prefix}:)"


def _grafana_variable(variable: Variable, prefix: str) -> dict[str, Any]:
    query = f"label_values({prefix}:num_requests_running, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _grafana_panel(panel: Panel, place: dict[str, int], panel_id: int, prefix: str) -> dict[str, Any]:
    unit, _ = _UNITS[panel.unit]
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.is_stacked else 0, "showPoints": "never"}
    custom["stacking"] = {"mode": "normal" if panel.is_stacked else "none"}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.is_stat:
        custom, options = {}, {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
    return {
        "id": panel_id,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": place["x"], "y": place["y"], "w": place["width"], "h": place["height"]},
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": promql(query.expression, prefix),
                "legendFormat": query.legend or panel.title,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def perses_dashboard(prefix: str) -> dict[str, Any]:
    """The dashboard as `percli apply` takes it, for the default data source of the project `quire`."""
    panels: dict[str, Any] = {}
    layouts: list[dict[str, Any]] = []
    for row in ROWS:
        items: list[dict[str, Any]] = []
        for panel, place in places(row.panels, 0):
            name = f"panel_{len(panels) + 1}"
            panels[name] = _perses_panel(panel, prefix)
            items.append({**place, "content": {"$ref": f"#/spec/panels/{name}"}})
        display = {"title": row.title, "collapse": {"open": not row.is_collapsed}}
        layouts.append({"kind": "Grid", "spec": {"display": display, "items": items}})
    return {
        "kind": "Dashboard",
        "metadata": {"name": f"{prefix}-engine", "project": "quire"},
        "spec": {
            "display": {"name": _title(prefix)},
            "duration": "1h",
            "refreshInterval": "10s",
            "variables": [_perses_variable(each, prefix) for each in VARIABLES],
            "panels": panels,
            "layouts": layouts,
        },
    }


def _perses_variable(variable: Variable, prefix: str) -> dict[str, Any]:
    values = {"labelName": variable.label, "matchers": [f"{prefix}:num_requests_running"]}
    return {
        "kind": "ListVariable",
        "spec": {
            "name": variable.name,
            "display": {"name": variable.title, "hidden": False},
            "allowAllValue": True,
            "allowMultiple": True,
            "customAllValue": ".*",
            "defaultValue": "$__all",
            "plugin": {"kind": "PrometheusLabelValuesVariable", "spec": values},
        },
    }


def _perses_panel(panel: Panel, prefix: str) -> dict[str, Any]:
    _, unit = _UNITS[panel.unit]
    chart: dict[str, Any] = {
        "kind": "TimeSeriesChart",
        "spec": {
            "legend": {"position": "bottom"},
            "yAxis": {"format": {"unit": unit}},
            "visual": {"stack": "all", "areaOpacity": 0.2} if panel.is_stacked else {},
        },
    }
    if panel.is_stat:
        spec = {"calculation": "last-number", "format": {"unit": unit}, "sparkline": {}}
        chart = {"kind": "StatChart", "spec": spec}
    display = {"name": panel.title} | ({"description": panel.description} if panel.description else {})
    queries = [
        {
            "kind": "TimeSeriesQuery",
            "spec": {
                "plugin": {
                    "kind": "PrometheusTimeSeriesQuery",
                    "spec": {
                        "query": promql(query.expression, prefix),
                        "seriesNameFormat": query.legend or panel.title,
                    },
                }
            },
        }
        for query in panel.queries
    ]
    return {"kind": "Panel", "spec": {"display": display, "plugin": chart, "queries": queries}}


def write_dashboards(folder: Path, prefix: str) -> list[Path]:
    """Writes `grafana/PREFIX.json` and `perses/PREFIX.json` below the folder, and returns where they are."""
    written: list[Path] = []
    for name, dashboard in (("grafana", grafana_dashboard(prefix)), ("perses", perses_dashboard(prefix))):
        path = folder / name / f"{prefix}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(path)
    return written


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Writes the dashboards for Grafana and Perses.")
    parser.add_argument("--prefix", default="quire", help="the server's --metrics-prefix")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that gets grafana and perses")
    arguments = parser.parse_args()
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", arguments.prefix):
        parser.error(f"--prefix must be letters, digits and underscores, got {arguments.prefix!r}")
    for path in write_dashboards(arguments.out, arguments.prefix):
        print(path)


if __name__ == "__main__":
    main()
