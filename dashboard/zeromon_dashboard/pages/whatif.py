"""The page "What if": predicted changes of a run, as `zeromon plan --changes` has them. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.base.units import human_seconds
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.charts import MIB
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import CONFIG, data_grid, number_column, text_column

MAX_POINTS = 2000
_EXAMPLES = "stage=0,1,2,3 micro-batch=1,2,4   reshard=no   prefetch=2   link=2   straggler=median"

COLUMNS = (
    text_column("change", "change", minWidth=200, pinned="left"),
    number_column("step", "step, ms"),
    text_column("interval", "from to", 180),
    number_column("difference", "difference, ms"),
    number_column("exposed", "exposed, ms"),
    number_column("memory", "device, MiB"),
    text_column("fits", "fits", 90),
    number_column("mfu", "MFU, %"),
    number_column("tokens", "tokens/s"),
)


def content(_: Known) -> Page:
    """Nothing that changes by itself: a prediction is made when it is asked for."""
    return Page({})


def skeleton(_: Parts, route: Route) -> list[Any]:
    """The changes that are asked for, and the place for what they would do."""
    return [
        dmc.Group(
            [
                dmc.TextInput(
                    id="changes",
                    value=route.changes,
                    placeholder=_EXAMPLES,
                    label="Changes: NAME=VALUE,... Each value is a row; several names are combined.",
                    description="Empty: the usual changes, one by one. "
                    "The names are those of the options of zeromon plan.",
                    style={"flex": "1 1 320px"},
                    size="sm",
                ),
                dmc.Button("predict", id="predict", size="sm"),
            ],
            align="flex-end",
        ),
        dcc.Loading(html.Div(id="predicted"), delay_show=300, type="dot"),
    ]


def prediction_view(plan: dict[str, Any]) -> list[Any]:
    """The table and the chart of what ``zeromon plan --changes --json`` prints."""
    points = plan["points"]
    notes = [f"speeds: {speed}" for speed in plan["speeds"]] if points[0].get("step_seconds") else []
    notes += [f"note: {note}" for note in plan["notes"]]
    notes += list(
        dict.fromkeys(f"{plotly_figures.change_text(p)}: {p['error']}" for p in points if p.get("error"))
    )
    needs = dict.fromkeys(p.get("step_seconds_unknown") for p in points)
    notes += [f"step time n/a without {missing}" for missing in needs if missing]
    if any(point.get("pareto") for point in points):
        notes.insert(0, f"* {plotly_figures.PARETO}")
    components: list[Any] = [
        data_grid(
            "prediction",
            COLUMNS,
            {"rowData": [_predicted_point_row(n, p) for n, p in enumerate(points)]},
            520,
        )
    ]
    if any(p.get("step_seconds") is not None for p in points):
        chart = plotly_figures.whatif_figure(plan)
        components.append(dmc.Paper(dcc.Graph(id="pareto", figure=chart, config=CONFIG), p=4, mt="sm"))
    return [*components, *(dmc.Text(note, size="xs", c="dimmed") for note in notes)]


def _predicted_point_row(number_: int, point: dict[str, Any]) -> dict[str, Any]:
    marked = "* " if point.get("pareto") else ""
    row: dict[str, Any] = {"id": str(number_), "change": marked + plotly_figures.change_text(point)}
    if "bytes" not in point:
        return row | {"interval": "n/a", "fits": "n/a"}
    row |= {
        "memory": round(point["bytes"]["device"] / MIB),
        "fits": {None: "n/a", True: "yes", False: "no"}[point["fits"]],
        "mfu": None if point["mfu"] is None else round(100 * point["mfu"], 1),
        "tokens": None if point["tokens_per_second"] is None else round(point["tokens_per_second"]),
    }
    if point["step_seconds"] is None:
        return row | {"interval": "n/a"}
    step_parts, gain = point["step_parts"], point["difference_seconds"]
    low, high = map(human_seconds, point["step_seconds_interval"])
    return row | {
        "step": round(1e3 * point["step_seconds"], 1),
        "interval": f"{low} to {high}",
        "difference": None if gain is None else round(1e3 * gain, 1),
        "exposed": round(1e3 * (step_parts["communication"] + step_parts["waiting"]), 1),
    }
