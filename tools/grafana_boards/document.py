"""Dashboards as Grafana imports them, built with its Foundation SDK.

The SDK's own layout runs over the edge, and it numbers neither panels nor queries: that is done here.
"""

import json
import string
from collections.abc import Iterator, Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DashboardSpecialValueMapOptions,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    GridPos,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana_boards.boards import EVENTS
from grafana_boards.panels import (
    ALWAYS_1,
    BLUE,
    LABEL_COLOURS,
    NAME_COLOURS,
    NEUTRAL,
    PART_COLOURS,
    RANK_COLOURS,
    SEVERITY_COLOURS,
    SHORTEST_AXIS,
    Colours,
    Dashboard,
    Panel,
    Query,
    Row,
)

WIDTH = 24
_TAG = "zeromon"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_CHOICES = {
    "run": "label_values(zeromon_rank_info, run)",
    "node": 'label_values(zeromon_rank_info{run=~"$run"}, node)',
    "rank": 'label_values(zeromon_rank_info{run=~"$run", node=~"$node"}, rank)',
}
_BUILDERS: dict[str, Any] = {
    "stat": stat.Panel,
    "timeseries": timeseries.Panel,
    "bars": bargauge.Panel,
    "table": table.Panel,
    "ranks": statushistory.Panel,
    "heatmap": heatmap.Panel,
}


def document(board: Dashboard) -> str:
    """The JSON of a dashboard."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags([_TAG])
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("zeromon")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("data"))
    )
    for event in EVENTS:
        made.annotation(
            dashboard.AnnotationQuery()
            .name(event.name)
            .datasource(_SOURCE)
            .icon_color(event.colour)
            .expr(event.expr)
        )
    for name in board.variables:
        made.with_variable(_variable(name, many=name != "run" or board.uid == "zeromon-fleet"))
    row = dashboard.Row("")
    for number, (place, item) in enumerate(placed(board), 1):
        if isinstance(item, Row):
            row = dashboard.Row(item.title).id(number).grid_pos(place).collapsed(item.collapsed)
            made.with_row(row)
            closed = item.collapsed
        else:
            panel = _panel(item).id(number).grid_pos(place)
            row.with_panel(panel) if closed else made.with_panel(panel)
    content = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    for event, mark in zip(EVENTS, content["annotations"]["list"], strict=True):
        mark["titleFormat"], mark["step"] = (
            event.title,
            "15s",
        )  # the SDK does not know Prometheus's own
    return _text(content)


def _text(content: dict[str, Any]) -> str:
    """JSON with one line per panel, so that a change of a panel is a change of a line."""
    panels = ",\n".join(f"  {json.dumps(panel)}" for panel in content.pop("panels"))
    rest = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items())
    return f'{{\n{rest} "panels": [\n{panels}\n ]\n}}\n'


def placed(board: Dashboard) -> Iterator[tuple[GridPos, Row | Panel]]:
    """Rows and panels with their places; the panels of a line share its whole width."""
    y = 0
    for row in board.rows:
        yield GridPos(h=1, w=WIDTH, x=0, y=y), row
        y += 1
        below = y
        for line in _lines_of(row.panels):
            total, x = sum(panel.width for panel in line), 0
            for panel in line:
                width = WIDTH * panel.width // total
                yield GridPos(h=panel.height, w=width, x=x, y=below), panel
                x += width
            below += line[0].height
        y = y if row.collapsed else below


def _lines_of(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    line: list[Panel] = []
    for panel in panels:
        if sum(other.width for other in line) + panel.width > WIDTH:
            yield line
            line = []
        line.append(panel)
    yield line


def _variable(name: str, *, many: bool) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(name)
        .label(name)
        .datasource(_SOURCE)
        .query(_CHOICES[name])
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .multi(many)
        .include_all(many)
    )
    if many:
        made.current(VariableOption(selected=True, text="All", value="$__all"))
    return made


def _panel(panel: Panel) -> Any:
    made = _BUILDERS[panel.kind]().title(panel.title).description(panel.help).unit(panel.unit)
    made.datasource(_SOURCE)
    for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        made.with_target(_target(letter, query, panel.kind))
    if panel.kind == "bars" or (panel.kind == "timeseries" and not panel.floats):
        made.min(0)
    if panel.unit == "percentunit" and panel.top == 1 and panel.kind in ("bars", "timeseries"):
        made.max(1)
    if panel.missing:
        made.mappings([_unknown(panel.missing)])
    if panel.unit == "percentunit" and panel.kind in ("bars", "stat"):
        made.decimals(1)
    if panel.colours:
        made.thresholds(_thresholds(panel.colours))
    if panel.names:
        made.text_mode(BigValueTextMode.NAME).color_mode(BigValueColorMode.BACKGROUND)
    if panel.kind == "timeseries":
        _as_lines(made, panel)
    elif panel.kind == "bars":
        made.orientation(VizOrientation.HORIZONTAL).display_mode(BarGaugeDisplayMode.BASIC)
        made.max_viz_height(40)
    elif panel.kind == "table":
        made.transformations(_joined(panel.queries)).min_width(90)
        _as_cells(made, panel)
    elif panel.kind == "ranks":
        made.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        made.show_value(VisibilityMode.NEVER)
    elif panel.kind == "heatmap":
        made.calculate(True)
    links = [_opens(board, _labels(panel)) for column, board in panel.links if not column]
    return made.data_links(links) if links else made


def _unknown(text: str) -> SpecialValueMap:
    """*text* in place of a value: a plain "No data" would have the colour of a good or bad one."""
    result = ValueMappingResult(text=text, color=NEUTRAL[0][1])
    match = SpecialValueMatch.NULL_AND_NAN
    return SpecialValueMap(DashboardSpecialValueMapOptions(match=match, result=result))


def _thresholds(colours: Colours) -> dashboard.ThresholdsConfig:
    steps = [Threshold(at, colour) for at, colour in colours]
    steps[0].value = None  # as Grafana writes what has no lower end
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _opens(board: str, chosen: dict[str, str]) -> dashboard.DashboardLink:
    """The link from a value to *board*, at its run, and its rank or node where it has one."""
    values = "".join(f"&var-{name}={value}" for name, value in chosen.items())
    url = f"/d/{board}?${{__url_time_range}}&var-datasource=${{datasource}}{values}"
    return dashboard.DashboardLink(f"Open {board.replace('-', ': ')}").url(url)


def _labels(panel: Panel) -> dict[str, str]:
    """The choices that a link makes by the labels of a value, as far as its series have them."""
    named = "".join(query.legend for query in panel.queries)
    known = {name: f"${{__field.labels.{name}}}" for name in _CHOICES if f"{{{{{name}}}}}" in named}
    return {"run": "$run"} | known


def _as_cells(made: Any, panel: Panel) -> None:
    """The units, colours and links of a table's columns."""
    coloured = DynamicConfigValue("custom.cellOptions", {"type": "color-text"})
    for cell in panel.cells:
        look = [DynamicConfigValue("unit", cell.unit)]
        if cell.unit == "percentunit":
            look.append(DynamicConfigValue("decimals", 1))
        if cell.colours:
            look += [DynamicConfigValue("thresholds", _thresholds(cell.colours).build()), coloured]
        made.override_by_name(cell.column, look)
    if any("severity" in query.expr for query in panel.queries):
        words = {str(severity): {"color": colour} for severity, colour in SEVERITY_COLOURS.items()}
        mapping = {"type": "value", "options": words}
        made.override_by_name("severity", [DynamicConfigValue("mappings", [mapping]), coloured])
        made.override_by_name("rule", [DynamicConfigValue("custom.width", 240)])
    for column, board in panel.links:
        if column:
            link = _opens(board, {"run": "$run", column: "${__value.raw}"}).build()
            made.override_by_name(column, [DynamicConfigValue("links", [link])])


def _target(letter: str, query: Query, kind: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend)
    made.datasource(_SOURCE)
    if kind == "table":
        return made.instant().format(PromQueryFormat.TABLE)
    return made.instant() if kind in ("bars", "stat") else made.range()


def _as_lines(made: Any, panel: Panel) -> None:
    legend = common.VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM)
    made.legend(legend.display_mode(LegendDisplayMode.LIST))
    made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if panel.colours:  # lines keep a colour each; thresholds are drawn across
        style = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        made.thresholds_style(style)
    if not panel.floats and (panel.unit != "percentunit" or panel.top < 1):
        # Of zeros alone, Grafana makes an axis up to 100: 10,000 %, or 1.67 min
        made.axis_soft_max(SHORTEST_AXIS.get(panel.unit, panel.top))
    if panel.stacked:
        made.fill_opacity(50).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    _colour_lines(made, panel.queries)
    _dash_lines(made, panel.queries)


def _colour_lines(made: Any, queries: Sequence[Query]) -> None:
    """One colour for one name in all panels: of a phase, a cause, a rank, or what the legend says."""
    made.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    legends = [query.legend for query in queries]
    if {"{{phase}}", "{{cause}}"} & set(legends):
        for name, colour in PART_COLOURS.items():
            made.override_by_name(name, [_fixed(colour)])
    elif all(legend.startswith("rank {{rank}}") and legend.count("{{") == 1 for legend in legends):
        for digit, colour in enumerate(RANK_COLOURS):
            made.override_by_regexp(f"/^rank \\d*{digit}(?!\\d)/", [_fixed(colour)])
    else:
        for labels, colours in LABEL_COLOURS.items():
            for name, colour in colours.items() if legends[0].startswith(labels) else ():
                made.override_by_regexp(f"/^{name}/", [_fixed(colour)])
        for legend in legends:
            if "{{" not in legend:
                made.override_by_name(legend, [_fixed(NAME_COLOURS.get(legend, BLUE))])


def _dash_lines(made: Any, queries: Sequence[Query]) -> None:
    """The second and third figure of a rank or a collective are dashed: they have its colour."""
    if "{{" in queries[0].legend:
        for letter, dash in zip("BC"[: len(queries) - 1], ([10, 6], [2, 4]), strict=False):
            style = DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": dash})
            made.override_by_query(letter, [style])


def _fixed(colour: str) -> DynamicConfigValue:
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _joined(queries: Sequence[Query]) -> list[DataTransformerConfig]:
    """Several queries as columns of one table, named as they are, without the time."""
    values = {
        f"Value #{letter}" if len(queries) > 1 else "Value": query.legend
        for letter, query in zip(string.ascii_uppercase, queries, strict=False)
    }
    constant = {column: True for column, name in values.items() if name == ALWAYS_1}
    organize = {"excludeByName": {"Time": True, **constant}, "renameByName": values}
    return [
        DataTransformerConfig(id_val="merge", options={}),
        DataTransformerConfig(id_val="organize", options=organize),
    ]
