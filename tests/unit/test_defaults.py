"""Defaults that must agree with each other."""

from __future__ import annotations

from gpu_exporter.common.config.defaults import Settings


def test_the_owner_is_alerted_to_an_idle_gpu_when_it_becomes_a_candidate() -> None:
    """The alert, the dashboard and the reconciler use one number, so that there is no difference to explain."""
    settings = Settings()
    assert settings.alerts.idle_for == settings.policy.candidate_after == 3600.0
