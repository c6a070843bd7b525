"""`gpu-exporter` whose search for stalls looks at seconds in place of minutes: python -m tests.testbed.short_stalls FLAGS."""

from __future__ import annotations

from gpu_exporter.diagnosis.stalls.rules import StallRules

SHORT = {"flat_over": 20.0, "work_min": 10.0}


def shorten() -> None:
    """Replace numbers of the rule that are no settings."""
    defaults = StallRules()._replace(**SHORT)  # type: ignore[arg-type]
    StallRules.__new__.__defaults__ = tuple(defaults)


if __name__ == "__main__":
    shorten()
    from gpu_exporter.cli.main import main

    main()
