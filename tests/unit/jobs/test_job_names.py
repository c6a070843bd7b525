"""The names of jobs and pods that people write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.reports.jobs.names import AskedJob, parse_name


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("104", AskedJob("104")),
        ("job/104", AskedJob("104")),
        ("job 16_3", AskedJob("16", "_", "3")),
        ("104+1", AskedJob("104", "+", "1")),
        ("ml/fit-0", AskedJob(namespace="ml", name="fit-0")),
        ("", None),
        ("fit-0", None),
        ("ml/fit/main", None),
        ("16_", None),
        ("-1", None),
        ("١٢", None),
        ("99999999999", None),
    ],
)
def test_a_name_is_a_job_or_a_pod_or_is_refused(text: str, asked: AskedJob | None) -> None:
    assert parse_name(text) == asked
    if asked is not None and asked.number:
        assert parse_name(asked.text) == asked


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_name_ends_its_matcher(namespace: str, name: str) -> None:
    """A quote in a name is data, not the end of a string of PromQL."""
    asked = parse_name(f"{namespace}/{name}")
    for matchers in asked.matchers() if asked is not None else ():
        quoted = matchers.replace("\\\\", "").replace('\\"', "")
        assert quoted.count('"') == 2 * matchers.count("=") - 2 * (namespace + name).count("=") or asked.number
        assert "\n" not in matchers
