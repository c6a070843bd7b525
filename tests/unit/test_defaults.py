"""Defaults that have to agree with each other."""

from __future__ import annotations

from gpu_exporter.defaults import Settings


def test_the_owner_hears_of_an_idle_gpu_when_it_becomes_a_candidate() -> None:
    """One number in the alert, on the dashboard and in the reconciler, so that nobody has to explain the difference."""
    settings = Settings()
    assert settings.alerts.idle_for == settings.policy.candidate_after == 3600.0
