"""Parts of the dashboards: a board that places panels, and one function for each kind of panel.

Each panel has a fixed id, so that links and embedded panels (Open OnDemand) remain valid when panels are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from alerts.parameters import RUNBOOK
from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from gpu_exporter.common.model.meanings import CAUSES, sentence

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GPU_HOURS = "suffix:GPU-h"  # Grafana's own unit for hours would show 120 hours as 5 days
# Colours that colour-blind people can distinguish: Okabe and Ito, https://jfly.uni-koeln.de/color/ (2008).
USED, IDLE, IDLE_LONG, UNKNOWN = "#0072B2", "#E6C229", "#D55E00", "#CC79A7"
STALLED = "#7B2D8B"
FREE, OUTSIDE, NO_DATA, NEUTRAL, GOOD = "#8E8E8E", "#56B4E9", "#5A3A55", "#56B4E9", "#009E73"
CLOSED = "#BDBDBD"
INTERVAL = "1m"  # of the recordings; a shorter interval shows no more data
Query: TypeAlias = tuple[str, str]  # an expression, and the name of its series
Panel: TypeAlias = "stat.Panel | timeseries.Panel | table.Panel | bargauge.Panel | statetimeline.Panel | heatmap.Panel"
STATES = {  # of a holder, with their colours in a timeline
    "unknown": UNKNOWN,
    "held_no_process": IDLE_LONG,
    "held_idle": IDLE_LONG,
    "stalled": STALLED,
    "throttled": "#E6C229",
    "bursty": OUTSIDE,
    "low": OUTSIDE,
    "busy_inefficient": OUTSIDE,
    "healthy": USED,
}

MEANT = {  # columns that have a cause as text, and what they print for it
    "Why": {name: sentence(each.title) for name, each in CAUSES.items()},
    "What to change": {name: sentence(each.owner) or "-" for name, each in CAUSES.items()},
    "For the site": {name: sentence(each.site) or "-" for name, each in CAUSES.items()},
}
NOTHING: Mapping[int, str] = {}


class Board:
    """A dashboard. Places panels in the order in which they are added. Each row is as high as its highest panel."""

    def __init__(
        self, uid: str, title: str, description: str, since: str, refresh: str, empty: Mapping[int, str] = NOTHING
    ) -> None:
        """`empty`: by panel id, the text of a panel without data. Other panels show Grafana's `No data`. Tables must
        not be in it, because Grafana prints such a text in each empty cell.
        """
        self._empty = empty
        self._x = self._y = self._height = 0
        self._dashboard = (
            builders.Dashboard(title)
            .uid(uid)
            .description(description)
            .tags(["gpu", "gpu-exporter"])
            .time(since, "now")
            .refresh(refresh)
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(
                builders.DashboardLink("GPU dashboards")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags(["gpu-exporter"])
                .as_dropdown(True)
                .include_vars(True)
                .keep_time(True)
            )
            .link(
                builders.DashboardLink("Runbook")
                .type(models.DashboardLinkType.LINK)
                .icon("doc")
                .tooltip("How to handle an alert of gpu-exporter")
                .url(RUNBOOK)
                .target_blank(True)
            )
            .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        )

    def variable(self, name: str, label: str, query: str, *, one: bool = False, listed: bool = False) -> None:
        """Adds a variable with values from a list. By default all values are selected, including series without the
        label. `one`: exactly one value, by default the first. `listed`: "All" means only the values of the list.
        """
        variable = builders.QueryVariable(name).label(label).datasource(DATASOURCE).query(query)
        variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.NATURAL_ASC)
        if not one:
            every = models.VariableOption(selected=True, text="All", value="$__all")
            variable.multi(True).include_all(True).current(every)
            if not listed:
                variable.all_value(".*")  # not `.+`: Slurm jobs have no namespace, and All must include them
        self._dashboard.with_variable(variable)

    def text(self, name: str, label: str) -> None:
        """Adds a text variable, empty by default, which a link or a user sets."""
        empty = models.VariableOption(selected=True, text="", value="")
        self._dashboard.with_variable(builders.TextBoxVariable(name).label(label).default_value("").current(empty))

    def annotate(self, name: str, expression: str, color: str) -> None:
        """Adds annotations to every graph, at the times at which the expression has a result."""
        self._dashboard.annotation(
            builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color).expr(expression)
        )

    def row(self, id_: int, title: str) -> None:
        """Adds a heading. The next panels are placed below it."""
        self._break()
        place = models.GridPos(h=1, w=24, x=0, y=self._y)
        self._dashboard.with_row(builders.Row(title).id(id_).grid_pos(place))
        self._y += 1

    def put(self, panel: Panel, width: int, height: int) -> None:
        """Places the next panel. `width`: in columns, of which a row has 24. `height`: in units of 38 pixels."""
        if text := self._empty.get(panel.build().id_val or 0):
            panel.no_value(text)
        if self._x + width > 24:
            self._break()
        self._dashboard.with_panel(panel.grid_pos(models.GridPos(h=height, w=width, x=self._x, y=self._y)))
        self._x += width
        self._height = max(self._height, height)

    def _break(self) -> None:
        self._y += self._height
        self._x = self._height = 0

    def build(self) -> models.Dashboard:
        """The whole dashboard."""
        return self._dashboard.build()


def _stat(id_: int, title: str, description: str) -> stat.Panel:
    """The last values, without a curve."""
    return (
        stat.Panel()
        .id(id_)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def number(
    id_: int,
    title: str,
    description: str,
    expression: str,
    *,
    unit: str = "none",
    decimals: int = 0,
    color: str = NEUTRAL,
    alarm: float | None = None,
) -> stat.Panel:
    """Adds one number. It is orange at or above `alarm`, and green below."""
    panel = (
        _stat(id_, title, description)
        .unit(unit)
        .decimals(decimals)
        .no_value("unknown")
        .mappings(unknown_map())
        .with_target(instant("A", expression))
    )
    if alarm is None:
        return panel.color_scheme(fixed(color))
    return panel.thresholds(steps((None, GOOD), (alarm, IDLE_LONG)))


def texts(id_: int, title: str, description: str, queries: Sequence[Query]) -> stat.Panel:
    """Adds a panel that shows the names of the series instead of their values."""
    panel = (
        _stat(id_, title, description)
        .unit("none")
        .no_value("none")
        .text_mode(shapes.BigValueTextMode.NAME)
        .color_mode(shapes.BigValueColorMode.NONE)
        .text(common.VizTextDisplayOptions().title_size(16))
    )
    for ref_id, (expression, legend) in zip("ABC", queries, strict=False):
        panel.with_target(instant(ref_id, expression, legend))
    return panel


def graph(
    id_: int,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    most: float | None = None,
    limit: float | None = None,
) -> timeseries.Panel:
    """Adds a graph with lines. `most`: upper end of the axis. `limit`: value of a dashed line."""
    panel = (
        timeseries.Panel()
        .id(id_)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .interval(INTERVAL)
        .line_width(1)
        .fill_opacity(0)
        .show_points(shapes.VisibilityMode.NEVER)
        .span_nulls(False)  # a gap is unknown time and remains a gap
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(shapes.LegendDisplayMode.LIST)
            .placement(shapes.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
    )
    for position, (expression, legend) in enumerate(queries):
        panel.with_target(over_time(chr(ord("A") + position), expression, legend))
    if most is not None:
        panel.max(most)
    if limit is not None:
        panel.axis_soft_max(limit).thresholds(steps((None, "transparent"), (limit, IDLE_LONG)))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED))
    return panel


def areas(id_: int, title: str, description: str, unit: str, parts: Sequence[tuple[str, str, str]]) -> timeseries.Panel:
    """Adds a graph of stacked parts, each with its expression, name and colour."""
    panel = graph(id_, title, description, unit, [(expression, name) for expression, name, _ in parts])
    for _, name, color in parts:
        panel.override_by_name(name, [value("color", {"mode": "fixed", "fixedColor": color})])
    stacking = common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("parts")
    return panel.fill_opacity(70).line_width(0).stacking(stacking)


def stack(id_: int, title: str, description: str, unit: str, queries: Sequence[Query]) -> timeseries.Panel:
    """Adds a graph of stacked parts, with Grafana's colours."""
    panel = graph(id_, title, description, unit, queries)
    stacking = common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("parts")
    return panel.fill_opacity(70).line_width(0).stacking(stacking)


def bars(id_: int, title: str, description: str, unit: str, expression: str, legend: str) -> bargauge.Panel:
    """Adds a panel that shows values as bars."""
    return (
        bargauge.Panel()
        .id(id_)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .decimals(1)
        .min(0)
        .no_value("unknown")
        .orientation(shapes.VizOrientation.HORIZONTAL)
        .display_mode(shapes.BarGaugeDisplayMode.BASIC)
        .name_placement(shapes.BarGaugeNamePlacement.LEFT)
        .sizing(shapes.BarGaugeSizing.MANUAL)
        .min_viz_height(16)
        .max_viz_height(32)
        .color_scheme(fixed(IDLE_LONG))
        .with_target(instant("A", expression, legend))
    )


def rows(
    id_: int,
    title: str,
    description: str,
    targets: Mapping[str, str],
    columns: Mapping[str, str],
    hidden: Sequence[str],
    sort_by: str,
) -> table.Panel:
    """Adds a table of several instant queries, merged by the labels that they share.

    `targets`: expression by name; the column `Value #NAME` has its value. `columns`: titles by the names that Grafana
    gives to columns. `hidden`: columns that only keep rows apart.
    """
    organize = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {name: position for position, name in enumerate(columns)},
        "renameByName": dict(columns),
    }
    panel = (
        table.Panel()
        .id(id_)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .filterable(True)
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
        # As a transformation too: after a user has sorted the table, equal rows keep this order.
        .with_transformation(
            models.DataTransformerConfig(id_val="sortBy", options={"sort": [{"field": sort_by, "desc": True}]})
        )
        .sort_by([common.TableSortByFieldState().display_name(sort_by).desc(True)])
    )
    for name, expression in targets.items():
        panel.with_target(instant(name, expression, in_table=True))
    return panel


def in_words(texts: Mapping[str, str]) -> list[models.DynamicConfigValue]:
    """Shows texts instead of codes in a column of a table. Long texts take several lines."""
    named = {code: models.ValueMappingResult(text=text) for code, text in texts.items()}
    return [
        value("mappings", [models.ValueMap(named)]),
        value("custom.cellOptions", {"type": "auto", "wrapText": True}),
    ]


def timeline(
    id_: int, title: str, description: str, expression: str, legend: str, names: Mapping[float, tuple[str, str]]
) -> statetimeline.Panel:
    """Adds a graph of states over time. `names`: text and colour by value."""
    texts = {
        f"{number:g}": models.ValueMappingResult(text=text, color=color, index=index)
        for index, (number, (text, color)) in enumerate(names.items())
    }
    return (
        statetimeline.Panel()
        .id(id_)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .interval(INTERVAL)
        .mappings([models.ValueMap(texts)])
        .merge_values(True)
        .show_value(shapes.VisibilityMode.AUTO)
        .row_height(0.8)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .with_target(over_time("A", expression, legend))
    )


def heat_map(id_: int, title: str, description: str, expression: str) -> heatmap.Panel:
    """Adds a graph of counts by `le` and time."""
    target = over_time("A", expression, "{{le}}").format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .id(id_)
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .interval(INTERVAL)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Blues").steps(32))
        .y_axis(heatmap.YAxisConfig().unit("percentunit"))
        .show_legend()
        .with_target(target)
    )


def instant(ref_id: str, expression: str, legend: str = "", in_table: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(expression).instant()
    if in_table:
        target.format(PromQueryFormat.TABLE)
    return target.legend_format(legend) if legend else target


def over_time(ref_id: str, expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(expression).range().legend_format(legend)


def value(key: str, what: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(key, what)


def fixed(color: str) -> builders.FieldColor:
    return builders.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(color)


def steps(*pairs: tuple[float | None, str]) -> builders.ThresholdsConfig:
    thresholds = [models.Threshold(start, color) for start, color in pairs]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)


def colored(*pairs: tuple[float | None, str]) -> list[models.DynamicConfigValue]:
    """Colours the text of a cell by `pairs` of lower limit and colour. Without pairs, all cells have the same colour.
    The cell has the type color-text, because a cell of type auto would show `unknown` without a colour.
    """
    if not pairs:
        return [
            value("custom.cellOptions", {"type": "color-text"}),
            value("color", {"mode": "fixed", "fixedColor": "text"}),
        ]
    thresholds = {"mode": "absolute", "steps": [{"value": start, "color": color} for start, color in pairs]}
    return [
        value("custom.cellOptions", {"type": "color-text"}),
        value("color", {"mode": "thresholds"}),
        value("thresholds", thresholds),
    ]


def or_unknown() -> list[models.DynamicConfigValue]:
    """Shows `unknown` in an empty cell, so that it is not read as 0."""
    return [value("mappings", unknown_map()), value("noValue", "unknown")]


def unknown_map() -> list[models.SpecialValueMap]:
    result = models.ValueMappingResult(text="unknown", color=UNKNOWN)
    return [
        models.SpecialValueMap(models.DashboardSpecialValueMapOptions(models.SpecialValueMatch.NULL_AND_NAN, result))
    ]


def link(title: str, url: str) -> list[models.DynamicConfigValue]:
    """Links a cell to another dashboard."""
    return [value("links", [{"title": title, "url": url, "targetBlank": False}])]
