"""The state file: counters that survive a restart without ever having been published higher.

The file holds high-water marks: each counter's value plus the most that can accrue until the next write, written
before anything beyond the previous mark is published. After kill -9 at any instruction a counter therefore resumes at
or above the last published value, by at most `write_interval`. Measured elsewhere: a counter restored 10 s too low
makes increase() 625,362 instead of 230, since Prometheus takes the fall for a reset.

The format is one header line (name, version, CRC-32 of the rest) and JSON. It is replaced by rename, so it is whole or
absent; anything else about it that does not add up (checksum, boot id, version) means starting at 0, which is a reset
that Prometheus understands. The write interval is split in two: the marks lie half an interval ahead and are renewed
each half, since restored busy and idle time together may push observed time up by two margins.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_exporter.ledger.ledger import HolderAccount, Ledger, UnitAccount
from gpu_exporter.model import HolderKey, HolderTotals, UnitId, UnitTotals

VERSION = 1
HEADER = "gpu-exporter-state"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
UNIT_COUNTERS = ("busy_s", "observed_s", "idle_s")
HOLDER_COUNTERS = ("held_s", "busy_s", "observed_s", "idle_s", "low_s", "high_s")
MAX_BOARD_POWER_W = 3000.0  # where the limit is unknown; above any board sold in 2026


class StateInUse(Exception):
    """Another process writes this state directory."""


def read_boot_id(path: Path = BOOT_ID) -> str:
    """The kernel's boot id; empty when it cannot be read, which never matches."""
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


MarkKey = tuple[UnitId, HolderKey | None, str]


class StateFile:
    """One directory with the state of one exporter, locked for this process."""

    def __init__(self, directory: Path, write_interval_s: float, boot_id: str) -> None:
        self.path = directory / "state"
        self.margin_s = write_interval_s / 2
        self.marks: dict[MarkKey, float] = {}
        self._boot_id = boot_id
        self._lock_path = directory / "lock"
        self._lock: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises StateInUse, OSError (directory missing or read-only)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(handle)
            raise StateInUse(f"{self._lock_path}: another gpu-exporter writes this state directory") from exc
        self._lock = handle

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def restore(self, ledger: Ledger) -> str:
        """Give the ledger what the file proves. Returns why nothing was restored, "" when something was."""
        try:
            header, _, body = self.path.read_text("utf-8").partition("\n")
        except FileNotFoundError:
            return "no state file yet"
        except (OSError, UnicodeDecodeError) as exc:
            return f"state file unreadable: {exc}"
        if header != f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}":
            return "state file damaged or of another version"
        data = json.loads(body)
        if not self._boot_id or data["boot_id"] != self._boot_id:
            return "state file of another boot"
        for entry in data["units"]:
            unit = UnitId(*entry.pop("unit"))
            account = UnitAccount(**entry)
            account.observed_s = max(account.observed_s, account.busy_s + account.idle_s)
            ledger.restored_units[unit] = account
        for entry in data["holders"]:
            unit, key = UnitId(*entry.pop("unit")), HolderKey(*entry.pop("holder"))
            holder = HolderAccount(**entry)
            holder.observed_s = max(holder.observed_s, holder.busy_s + holder.idle_s, holder.low_s + holder.high_s)
            holder.held_s = max(holder.held_s, holder.observed_s)
            ledger.restored_holders[unit, key] = holder
        return ""

    def write(self, ledger: Ledger, *, final: bool = False) -> None:
        """Write marks ahead of the ledger's counters and remember them; exact values when `final`.

        Raises OSError when the directory cannot be written; the old marks then stay in force.
        """
        margin = 0.0 if final else self.margin_s
        marks: dict[MarkKey, float] = {}
        units = [self._unit_entry(unit, a, margin, marks) for unit, a in self._units(ledger)]
        holders = [
            self._holder_entry(i, a, margin, self._power_limit(ledger, i[0]), marks) for i, a in self._holders(ledger)
        ]
        body = json.dumps({"boot_id": self._boot_id, "units": units, "holders": holders})
        self._replace(f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}\n{body}")
        self.marks = marks

    @staticmethod
    def _units(ledger: Ledger) -> Iterator[tuple[UnitId, UnitAccount]]:
        """Live accounts, and restored ones whose GPU has not answered yet."""
        yield from ledger.units.items()
        yield from ledger.restored_units.items()

    @staticmethod
    def _holders(ledger: Ledger) -> Iterator[tuple[tuple[UnitId, HolderKey], HolderAccount]]:
        yield from ledger.holders.items()
        yield from ledger.restored_holders.items()

    @staticmethod
    def _power_limit(ledger: Ledger, unit: UnitId) -> float:
        account = ledger.units.get(unit) or ledger.restored_units.get(unit)
        return (account.power_limit_w if account is not None else None) or MAX_BOARD_POWER_W

    def bound_unit(self, unit: UnitId, totals: UnitTotals) -> UnitTotals:
        """The totals, but nothing beyond the marks on disk."""
        return replace(totals, **self._bounded(unit, None, totals, UNIT_COUNTERS))

    def bound_holder(self, unit: UnitId, key: HolderKey, totals: HolderTotals) -> HolderTotals:
        """The totals, but nothing beyond the marks on disk."""
        counters = HOLDER_COUNTERS if totals.energy_j is None else (*HOLDER_COUNTERS, "energy_j")
        return replace(totals, **self._bounded(unit, key, totals, counters))

    def _bounded(
        self, unit: UnitId, key: HolderKey | None, totals: object, counters: tuple[str, ...]
    ) -> dict[str, Any]:
        bounded: dict[str, Any] = {}
        for counter in counters:
            mark = self.marks.get((unit, key, counter))
            if mark is not None:
                bounded[counter] = min(getattr(totals, counter), mark)
        return bounded

    def _unit_entry(
        self, unit: UnitId, account: UnitAccount, margin: float, marks: dict[MarkKey, float]
    ) -> dict[str, Any]:
        entry = asdict(account)
        entry["energy_j"] = None  # the driver's own counter, never ours to restore
        for counter in UNIT_COUNTERS:
            entry[counter] += margin
            marks[unit, None, counter] = entry[counter]
        return {"unit": unit, **entry}

    def _holder_entry(
        self,
        holder_id: tuple[UnitId, HolderKey],
        account: HolderAccount,
        margin: float,
        power_limit_w: float,
        marks: dict[MarkKey, float],
    ) -> dict[str, Any]:
        unit, key = holder_id
        entry = asdict(account)
        for counter in HOLDER_COUNTERS:
            entry[counter] += margin
            marks[unit, key, counter] = entry[counter]
        if entry["energy_j"] is not None:
            entry["energy_j"] += margin * power_limit_w
            marks[unit, key, "energy_j"] = entry["energy_j"]
        return {"unit": unit, "holder": key, **entry}

    def _replace(self, text: str) -> None:
        handle, name = tempfile.mkstemp(prefix=".state-", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
