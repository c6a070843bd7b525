"""The dashboard `GPUs: held, used, wasted`: panels, variables and where they stand. The PromQL is in queries.py."""

from __future__ import annotations

from alerts.parameters import RUNBOOK
from grafana.queries import Queries
from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from gpu_exporter.defaults import Settings
from gpu_exporter.digest import oversized
from gpu_exporter.durations import format_duration
from gpu_exporter.model import ALLOCATION_KEY

UID = "gpu-exporter-allocation"
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TENANTS_SHOWN = 10  # bars that fit
GPU_HOURS = "suffix:GPU-h"  # Grafana's own unit for hours would turn 120 of them into 5 days
USED, IDLE, IDLE_LONG, UNKNOWN, NEUTRAL = "green", "yellow", "orange", "purple", "blue"
STATE_COLORS = {
    "unknown": UNKNOWN,
    "held_no_process": IDLE_LONG,
    "held_idle": IDLE_LONG,
    "throttled": "red",
    "bursty": "light-green",
    "low": "light-green",
    "healthy": USED,
}
# By the names that Grafana gives them; what is left out here is needed only to tell rows apart.
HOLDER_COLUMNS = {
    "holder": "Holder",
    "user": "User",
    "account": "Account",
    "node": "Node",
    "gpu": "GPU",
    "mig": "MIG",
    "name": "Model",
    "state": "State",
    "Value #utilization": "Utilization",
    "Value #idle": "Idle for",
    "Value #holders": "Held since",
}
HOLDER_WIDTHS = {  # the holder takes the rest; without widths all columns get 150 pixels and the last ones fall off
    "User": 100,
    "Account": 110,
    "Node": 130,
    "GPU": 75,
    "MIG": 75,
    "Model": 160,
    "State": 150,
    "Utilization": 125,
    "Idle for": 125,
    "Held since": 165,
}
HOLDER_HIDDEN = ("Time", "instance", *ALLOCATION_KEY)
TENANT_COLUMNS = {
    "tenant": "Namespace or account",
    "Value #held": "Held",
    "Value #idle": "Idle",
    "Value #unknown": "Unknown",
    "Value #share": "Idle share",
}
OVERSIZED_COLUMNS = {
    "holder": "Holder",
    "user": "User",
    "account": "Account",
    "name": "Model",
    "Value #hours": "GPU-hours",
    "Value #mean": "Utilization",
    "Value #peak": "Most memory",
}


def build_dashboard(settings: Settings) -> models.Dashboard:
    """The whole dashboard with the windows of these settings."""
    return _Builder(settings).build()


class _Builder:
    """Numbers the panels in the order of their calls."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queries = Queries(settings)
        self._next_id = 0
        self._dashboard = builders.Dashboard("GPUs: held, used, wasted").uid(UID)

    def build(self) -> models.Dashboard:
        (
            self._dashboard.description("Who holds which GPU, and is it used? Data: gpu-exporter.")
            .tags(["gpu", "gpu-exporter"])
            .time("now-24h", "now")
            .refresh("1m")
            .link(
                builders.DashboardLink("Runbook")
                .type(models.DashboardLinkType.LINK)
                .icon("doc")
                .tooltip("What to do about an alert of gpu-exporter")
                .url(RUNBOOK)
                .target_blank(True)
            )
        )
        self._add_variables()
        self._add_counts()
        self._add_history()
        self._add_holders()
        self._add_hours()
        self._add_oversized()
        self._add_nodes()
        self._add_health()
        return self._dashboard.build()

    def _add_variables(self) -> None:
        self._dashboard.with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        for name, label, query in (
            ("node", "Node", "label_values(gpu_exporter_build_info, node)"),
            ("namespace", "Namespace", 'label_values(gpu_allocation_info{node=~"$node"}, namespace)'),
        ):
            self._dashboard.with_variable(
                builders.QueryVariable(name)
                .label(label)
                .datasource(DATASOURCE)
                .query(query)
                .multi(True)
                .include_all(True)
                .all_value(".*")  # not `.+`: Slurm jobs have no namespace, and All must show them
                .current(models.VariableOption(selected=True, text="All", value="$__all"))
                .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
                .sort(models.VariableSort.NATURAL_ASC)
            )

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _add_stat(
        self, title: str, description: str, expression: str, color: str, place: models.GridPos, decimals: int = 0
    ) -> None:
        """A number. `color` "alarm" is green at 0 and red above."""
        panel = (
            stat.Panel()
            .id(self._id())
            .title(title)
            .description(description)
            .datasource(DATASOURCE)
            .grid_pos(place)
            .unit("none")
            .decimals(decimals)
            .no_value("unknown")
            .mappings(_unknown_map())
            .graph_mode(shapes.BigValueGraphMode.NONE)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .with_target(_instant("A", expression))
        )
        if color == "alarm":
            steps = [models.Threshold(None, "green"), models.Threshold(1, "red")]
            panel.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        else:
            panel.color_scheme(_fixed(color))
        self._dashboard.with_panel(panel)

    def _add_counts(self) -> None:
        queries, idle_for = self._queries, self._queries.idle_for
        diagnosis = self._settings.diagnosis
        newcomer = format_duration(diagnosis.coverage_min * diagnosis.window)
        by_share = "A MIG instance or a shared GPU counts by its share."
        for column, (title, description, expression, color) in enumerate(
            (
                (
                    "GPUs in all",
                    f"GPUs that were reported at any time of the last {idle_for}, also those that are lost by now. "
                    "Not filtered by namespace.",
                    queries.total,
                    NEUTRAL,
                ),
                ("Held", f"GPUs that a pod or a Slurm job holds. {by_share}", queries.held, NEUTRAL),
                (
                    "Held and used",
                    f"Held GPUs that did some work in the last {queries.state_window}. {by_share}",
                    queries.used,
                    USED,
                ),
                (
                    f"Idle under {idle_for}",
                    f"Held GPUs that are known to be idle, for less than {idle_for}. {by_share}",
                    queries.idle_short,
                    IDLE,
                ),
                (
                    f"Idle for {idle_for} or more",
                    f"Held GPUs that are known to have done nothing at all for {idle_for} without a break. {by_share}",
                    queries.idle_long,
                    IDLE_LONG,
                ),
                (
                    "Use unknown",
                    "Held GPUs of which nobody can tell whether they are used: no source, lost, no fresh sample, or "
                    f"seen for less than {newcomer}. They are not counted as idle. {by_share}",
                    queries.unknown,
                    UNKNOWN,
                ),
                (
                    "Free",
                    f"GPUs that answer and that nobody holds. Not filtered by namespace. {by_share}",
                    queries.free,
                    "text",
                ),
                (
                    "Without data",
                    f"GPUs that were reported in the last {idle_for} and now are lost, have no fresh sample, belong to "
                    "an exporter that is silent, or whose holder cannot be told. Not filtered by namespace.",
                    queries.no_data,
                    UNKNOWN,
                ),
            )
        ):
            self._add_stat(
                title,
                description,
                expression,
                color,
                models.GridPos(h=4, w=3, x=3 * column, y=0),
                int("share" in description),
            )

    def _add_history(self) -> None:
        queries = self._queries
        panel = (
            self._graph(
                "Held and used GPUs",
                "Areas: held GPUs, split into used, idle and unknown; they add up to the GPUs held. Lines: GPUs held "
                "and GPUs in all. A MIG instance or a shared GPU counts by its share.",
                "none",
                models.GridPos(h=9, w=24, x=0, y=4),
            )
            .fill_opacity(70)
            .line_width(0)
            .stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("parts"))
        )
        parts = (
            ("used", queries.used, USED),
            (f"idle for less than {queries.idle_for}", queries.idle_short, IDLE),
            (f"idle for {queries.idle_for} or more", queries.idle_long, IDLE_LONG),
            ("use unknown", queries.unknown, UNKNOWN),
        )
        lines = (("held", queries.held, NEUTRAL), ("GPUs in all", queries.total, "text"))
        for position, (name, expression, color) in enumerate((*parts, *lines)):
            properties = [models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})]
            if position >= len(parts):
                properties += [
                    models.DynamicConfigValue("custom.stacking", {"mode": "none"}),
                    models.DynamicConfigValue("custom.fillOpacity", 0),
                    models.DynamicConfigValue("custom.lineWidth", 2),
                ]
            panel.with_target(_range(chr(ord("A") + position), expression, name))
            panel.override_by_name(name, properties)
        self._dashboard.with_panel(panel)

    def _add_holders(self) -> None:
        queries = self._queries
        panel = (
            self._table(
                "Holders, longest idle first",
                "One row for each GPU or MIG instance that a pod or a Slurm job holds. Utilization: mean over the last "
                f"{queries.state_window}. Idle for: how long it is known to have done nothing, without a break. Both "
                "say unknown where there is no proof. Held since: start told by the scheduler, else when first seen.",
                models.GridPos(h=14, w=24, x=0, y=13),
                HOLDER_COLUMNS,
                HOLDER_HIDDEN,
                sort_by="Idle for",
            )
            .with_target(_instant("holders", queries.holders, in_table=True))
            .with_target(_instant("utilization", queries.utilization, in_table=True))
            .with_target(_instant("idle", queries.idle_run, in_table=True))
            .override_by_name(
                "Utilization",
                [
                    models.DynamicConfigValue("unit", "percentunit"),
                    models.DynamicConfigValue("decimals", 0),
                    *_colored(),
                    *_or_unknown(),
                ],
            )
            .override_by_name(
                "Idle for",
                [
                    models.DynamicConfigValue("unit", "s"),
                    models.DynamicConfigValue("decimals", 1),  # 5.3 hours
                    models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
                    models.DynamicConfigValue("color", {"mode": "thresholds"}),
                    models.DynamicConfigValue(
                        "thresholds",
                        {
                            "mode": "absolute",
                            "steps": [
                                {"value": None, "color": "text"},
                                {"value": 60, "color": IDLE},
                                {"value": self._settings.policy.candidate_after, "color": IDLE_LONG},
                            ],
                        },
                    ),
                    *_or_unknown(),
                ],
            )
            .override_by_name(
                "Model",
                [
                    models.DynamicConfigValue(
                        "mappings",
                        [
                            models.RegexMap(
                                models.DashboardRegexMapOptions("^NVIDIA (.+)$", models.ValueMappingResult(text="$1"))
                            )
                        ],
                    )
                ],
            )
            .override_by_name("Held since", [models.DynamicConfigValue("unit", "dateTimeAsIso")])
            .override_by_name(
                "State",
                [
                    models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
                    models.DynamicConfigValue("mappings", [_map_states()]),
                ],
            )
        )
        for name, width in HOLDER_WIDTHS.items():
            panel.override_by_name(name, [models.DynamicConfigValue("custom.width", width)])
        self._dashboard.with_panel(panel)

    def _add_hours(self) -> None:
        queries = self._queries
        wasted = (
            bargauge.Panel()
            .id(self._id())
            .title("Wasted GPU-hours by namespace or account")
            .description(
                "Hours in the dashboard's range in which a held GPU is known to have done nothing, by the holder's "
                f"namespace (pods) or account (Slurm jobs). The {TENANTS_SHOWN} largest. Unknown time is not counted. "
                "A MIG instance or a shared GPU counts by its share."
            )
            .datasource(DATASOURCE)
            .grid_pos(models.GridPos(h=10, w=10, x=0, y=27))
            .unit(GPU_HOURS)
            .decimals(1)
            .min(0)
            .orientation(shapes.VizOrientation.HORIZONTAL)
            .display_mode(shapes.BarGaugeDisplayMode.BASIC)
            .name_placement(shapes.BarGaugeNamePlacement.LEFT)
            .sizing(shapes.BarGaugeSizing.MANUAL)
            .min_viz_height(16)
            .max_viz_height(32)
            .color_scheme(_fixed(IDLE_LONG))
            .with_target(_instant("A", f"sort_desc(topk({TENANTS_SHOWN}, {queries.idle_hours}))", "{{tenant}}"))
        )
        self._dashboard.with_panel(wasted)
        panel = self._table(
            "GPU-hours by namespace or account",
            "Hours in the dashboard's range: held in all, of these known to be idle, and of unknown use. Idle share: "
            "idle hours of the hours in which use is known.",
            models.GridPos(h=10, w=14, x=10, y=27),
            TENANT_COLUMNS,
            ("Time",),
            sort_by="Idle",
        ).override_by_name(
            "Idle share",
            [
                models.DynamicConfigValue("unit", "percentunit"),
                models.DynamicConfigValue("decimals", 0),
                *_colored(),
                *_or_unknown(),
            ],
        )
        panel.override_by_name("Namespace or account", [models.DynamicConfigValue("custom.width", 260)])
        for ref_id, expression in (
            ("held", queries.held_hours),
            ("idle", queries.idle_hours),
            ("unknown", queries.unknown_hours),
            ("share", queries.idle_share),
        ):
            panel.with_target(_instant(ref_id, expression, in_table=True))
        for name in ("Held", "Idle", "Unknown"):
            properties = [models.DynamicConfigValue("unit", GPU_HOURS), models.DynamicConfigValue("decimals", 1)]
            panel.override_by_name(name, [*properties, *([*_colored(), *_or_unknown()] if name == "Idle" else [])])
        self._dashboard.with_panel(panel)

    def _add_oversized(self) -> None:
        panel = self._table(
            "Smaller would do",
            f"Pods and jobs that held whole GPUs for more than {oversized.HOURS_MIN:g} GPU-hours of the dashboard's "
            f"range, used them {oversized.MEAN_MAX:.0%} of the time or less, and never had more than "
            f"{oversized.PEAK_MAX / 1e9:g} GB in use on one: a MIG instance or a smaller GPU would do. Wants a range "
            "of days. Nobody is mailed or marked for it.",
            models.GridPos(h=8, w=24, x=0, y=37),
            OVERSIZED_COLUMNS,
            ("Time", "cluster", "scheduler", "namespace", "pod", "job_id", "Value #model"),
            sort_by="GPU-hours",
        )
        for ref_id, expression in self._queries.oversized.items():
            panel.with_target(_instant(ref_id, expression, in_table=True))
        for name, unit, decimals in (
            ("GPU-hours", GPU_HOURS, 0),
            ("Utilization", "percentunit", 0),
            ("Most memory", "bytes", 1),
        ):
            properties = {"unit": unit, "decimals": decimals}
            panel.override_by_name(name, [models.DynamicConfigValue(key, value) for key, value in properties.items()])
        self._dashboard.with_panel(panel)

    def _add_nodes(self) -> None:
        queries = self._queries
        power = self._graph(
            "Power by node",
            "Power of all GPUs of the node that tell their power, held or not, with a fresh sample.",
            "watt",
            models.GridPos(h=8, w=12, x=0, y=45),
        )
        self._dashboard.with_panel(power.min(0).with_target(_range("A", queries.power, "{{node}}")))
        utilization = self._graph(
            "Utilization by node",
            "Share of time in which a kernel ran, mean over the node's GPUs, held or not, for the time in which it is "
            "known. MIG instances have a line of their own, since a GPU in MIG mode tells nothing as a whole.",
            "percentunit",
            models.GridPos(h=8, w=12, x=12, y=45),
        )
        self._dashboard.with_panel(
            utilization.min(0)
            .max(1)
            .with_target(_range("A", queries.node_utilization, "{{node}}"))
            .with_target(_range("B", queries.instance_utilization, "{{node}}, MIG instances"))
        )

    def _add_health(self) -> None:
        queries, y = self._queries, 54
        self._dashboard.with_row(
            builders.Row("Exporter health").id(self._id()).grid_pos(models.GridPos(h=1, w=24, x=0, y=y - 1))
        )
        small = [models.GridPos(h=4, w=4, x=x, y=y + dy) for dy in (0, 4) for x in (0, 4)]
        self._add_stat(
            "Exporters reporting", "Exporters whose metrics arrive now.", queries.exporters, NEUTRAL, small[0]
        )
        self._add_stat(
            "Exporters silent",
            f"Exporters whose metrics arrived in the last {queries.idle_for}, but not now. Their GPUs count as GPUs "
            "without data.",
            queries.exporters_silent,
            "alarm",
            small[1],
        )
        self._add_stat(
            "Driver down",
            "Exporters that find no driver, or one that hangs as a whole, on nodes where a GPU is expected.",
            queries.driver_down,
            "alarm",
            small[2],
        )
        self._add_stat(
            "Sources of holders down",
            "Sources (kubelet, Slurm, files) whose last poll was not answered. Until they answer, some holder may be "
            "missing.",
            queries.sources_down,
            "alarm",
            small[3],
        )
        age = self._graph(
            "Age of the last sample",
            "Time since any GPU of the node last answered. A node whose line ends has an exporter that is silent.",
            "suffix:s",
            models.GridPos(h=8, w=8, x=8, y=y),
        )
        self._dashboard.with_panel(
            age.min(0)
            .axis_soft_max(self._settings.alerts.fresh_max)
            .thresholds(
                builders.ThresholdsConfig()
                .mode(models.ThresholdsMode.ABSOLUTE)
                .steps(
                    [models.Threshold(None, "transparent"), models.Threshold(self._settings.alerts.fresh_max, "red")]
                )
            )
            .thresholds_style(common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED))
            .with_target(_range("A", queries.sample_age, "{{node}}"))
        )
        coverage = self._graph(
            "Coverage",
            "Share of the time held for which use is known, mean over the node's holders. Alerts and labels need a "
            "high one; the rest of the time is unknown, not idle.",
            "percentunit",
            models.GridPos(h=8, w=8, x=16, y=y),
        )
        self._dashboard.with_panel(coverage.min(0).max(1).with_target(_range("A", queries.coverage, "{{node}}")))

    def _graph(self, title: str, description: str, unit: str, place: models.GridPos) -> timeseries.Panel:
        return (
            timeseries.Panel()
            .id(self._id())
            .title(title)
            .description(description)
            .datasource(DATASOURCE)
            .grid_pos(place)
            .unit(unit)
            .min(0)
            .line_width(1)
            .fill_opacity(0)
            .show_points(shapes.VisibilityMode.NEVER)
            .span_nulls(False)  # a gap is unknown time and stays one
            .legend(
                common.VizLegendOptions()
                .show_legend(True)
                .display_mode(shapes.LegendDisplayMode.LIST)
                .placement(shapes.LegendPlacement.BOTTOM)
            )
            .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI))
        )

    def _table(
        self,
        title: str,
        description: str,
        place: models.GridPos,
        columns: dict[str, str],
        hidden: tuple[str, ...],
        sort_by: str,
    ) -> table.Panel:
        """A table of several instant queries, merged by the labels that they share."""
        organize = {
            "excludeByName": dict.fromkeys(hidden, True),
            "indexByName": {name: position for position, name in enumerate(columns)},
            "renameByName": columns,
        }
        return (
            table.Panel()
            .id(self._id())
            .title(title)
            .description(description)
            .datasource(DATASOURCE)
            .grid_pos(place)
            .unit("none")
            .filterable(True)
            .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
            .with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))
            .sort_by([common.TableSortByFieldState().display_name(sort_by).desc(True)])
        )


def _instant(ref_id: str, expression: str, legend: str = "", in_table: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(expression).instant()
    if in_table:
        target.format(PromQueryFormat.TABLE)
    return target.legend_format(legend) if legend else target


def _range(ref_id: str, expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(ref_id).datasource(DATASOURCE).expr(expression).range().legend_format(legend)


def _fixed(color: str) -> builders.FieldColor:
    return builders.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(color)


def _colored() -> list[models.DynamicConfigValue]:
    """Paints the text, so that the color of `unknown` is seen: a cell of type auto has none."""
    return [
        models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
        models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": "text"}),
    ]


def _or_unknown() -> list[models.DynamicConfigValue]:
    """An empty cell says that nothing is known, so that nobody reads it as 0."""
    return [
        models.DynamicConfigValue("mappings", _unknown_map()),
        models.DynamicConfigValue("noValue", "unknown"),
    ]


def _unknown_map() -> list[models.SpecialValueMap]:
    result = models.ValueMappingResult(text="unknown", color=UNKNOWN)
    return [
        models.SpecialValueMap(models.DashboardSpecialValueMapOptions(models.SpecialValueMatch.NULL_AND_NAN, result))
    ]


def _map_states() -> models.ValueMap:
    return models.ValueMap(
        {
            state: models.ValueMappingResult(text=state, color=color, index=index)
            for index, (state, color) in enumerate(STATE_COLORS.items())
        }
    )
