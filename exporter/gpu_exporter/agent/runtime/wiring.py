"""Selects the settings that sampling needs, for the daemon, `--once`, `record` and tests."""

from __future__ import annotations

from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.common.config.defaults import Settings


def activity_rules(settings: Settings, driver_period_max_s: float = 1.0) -> ActivityRules:
    """Returns the settings that sampling needs. `driver_period_max_s`: as in ActivityRules."""
    ledger = settings.ledger
    return ActivityRules(
        interval_s=settings.sampling.interval,
        interval_max_s=settings.sampling.interval_max,
        gap_intervals=ledger.gap_intervals,
        power_floor_max_ratio=ledger.power_floor_max_ratio,
        power_active_step=ledger.power_active_step,
        driver_period_max_s=driver_period_max_s,
        gpm_idle_max_ratio=ledger.gpm_idle_max_ratio,
        gpm_sm_idle_max_ratio=ledger.gpm_sm_idle_max_ratio,
        pcie_idle_max_bytes_per_second=ledger.pcie_idle_max_bytes_per_second,
        nvlink_idle_max_bytes_per_second=ledger.nvlink_idle_max_bytes_per_second,
    )
