"""process_* series of the exporter itself."""

from __future__ import annotations

from gpu_exporter.agent.runtime.serve import ProcessSeries


def test_the_first_scrape_has_process_series() -> None:
    """A client may request the page before the first refresh. A rate over process_* must not begin with a gap."""
    names = {each.family.name for each in ProcessSeries().series}
    assert {"process_start_time_seconds", "process_resident_memory_bytes"} <= names
