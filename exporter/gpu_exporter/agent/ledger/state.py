"""Saves the counters in a file. After a restart they continue at or above their published values.

The exporter writes the exact counters at intervals, and publishes only values in the file (except the held time of
Slurm jobs). If the process is killed, the time since the last write is unknown, never idle.

The file is not flushed to the disk, because the page cache keeps the data of a killed process. After a crash of the
kernel, the boot id changes, and counters start at 0, which Prometheus treats as a reset. A small fall would be worse:
with a counter restored 10 s too low, increase() was 625,362 instead of 230 (docs/decisions/0004).

The format is one header line (name, version, CRC-32 of the rest) and JSON. A rename replaces the file, so that it is
complete or absent. If checksum, boot id or version do not match, counters start at 0.
"""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args

from gpu_exporter.agent.ledger.accounts import HolderAccount, UnitAccount
from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.agent.ledger.tenants import COUNTERS as TENANT_COUNTERS
from gpu_exporter.agent.ledger.tenants import TenantAccount
from gpu_exporter.common.files import PRIVATE, lock_kept, make_directory, read_kept, write_atomically
from gpu_exporter.common.model.holders import HolderKey, PastEnds, Scheduler, TenantKey
from gpu_exporter.common.model.totals import HolderTotals, TenantTotals, UnitTotals
from gpu_exporter.common.model.units import UnitId

log = logging.getLogger(__name__)
VERSION = 2
READ_MAX = 64 * 2**20  # bytes; a GPU with its holders needs some kB
HEADER = "gpu-exporter-state"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
UNIT_COUNTERS = ("busy_s", "observed_s", "idle_s", "unattributed_s")
HOLDER_COUNTERS = ("held_s", "busy_s", "observed_s", "idle_s", "low_s", "high_s", "stalled_s")
TotalsT = TypeVar("TotalsT", UnitTotals, HolderTotals, TenantTotals)
Limited: TypeAlias = tuple[tuple[int, str], ...]  # counters that are limited to the file: position and name


def _limit(kind: type[UnitTotals | HolderTotals | TenantTotals], *counters: str) -> Limited:
    return tuple((kind._fields.index(counter), counter) for counter in counters)


UNIT_LIMITED = _limit(UnitTotals, *UNIT_COUNTERS, "unattributed_j")
HOLDER_LIMITED = _limit(HolderTotals, *HOLDER_COUNTERS, "energy_j")
TENANT_LIMITED = _limit(TenantTotals, *TenantTotals._fields)


class StateInUse(Exception):
    """Another process writes this state directory."""


def read_boot_id(path: Path = BOOT_ID) -> str:
    """Returns the kernel's boot id, or "" if it cannot be read. With "", saved counters are never restored."""
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


Written: TypeAlias = dict[UnitId | tuple[UnitId, HolderKey] | TenantKey, dict[str, float]]  # counters by name
Numbers = Mapping[tuple[HolderKey, str], UnitId]
NO_NUMBERS: Numbers = MappingProxyType({})
NOT_WRITTEN: dict[str, float] = {}


class Prepared(NamedTuple):
    """The next content of the state file, and the counters in it."""

    text: str
    written: Written


class StateFile:
    """The state directory of one exporter, locked for this process."""

    def __init__(self, directory: Path, write_interval_s: float, boot_id: str) -> None:
        self.path = directory / "state"
        self.interval_s = write_interval_s
        self.written: Written = {}
        self.numbers: Numbers = NO_NUMBERS
        """The unit that each device number of a running holder meant when the file was written, set by `restore`."""
        self.past: PastEnds | None = None
        """The ended holders that the counters include, set by `restore`. None without a file of this boot."""
        self._boot_id = boot_id
        self._lock_path = directory / "lock"
        self._lock: int | None = None

    def acquire(self) -> None:
        """Takes the lock. Raises StateInUse, or OSError if the directory is missing, read-only or writable by other
        users.
        """
        make_directory(self.path.parent)
        try:
            self._lock = lock_kept(self._lock_path)
        except BlockingIOError as exc:
            raise StateInUse(
                f"{self._lock_path}: another gpu-exporter uses this state directory: stop it, or set "
                "another --state.directory"
            ) from exc

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def restore(self, ledger: Ledger) -> str:
        """Restores the ledger from the file. Returns why nothing was restored, "" after a success."""
        try:
            header, _, body = read_kept(self.path, READ_MAX).decode("utf-8").partition("\n")
        except FileNotFoundError:
            return "no state file yet"
        except (OSError, UnicodeDecodeError) as exc:
            return f"state file unreadable: {exc}"
        if header != f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}":
            return "the state file is damaged, or of another version"
        try:
            data = json.loads(body)
            if not self._boot_id or data["boot_id"] != self._boot_id:
                return "state file of another boot"
            units = {_unit(entry.pop("unit")): _checked(UnitAccount(**entry)) for entry in data["units"]}
            holders = {
                (_unit(entry.pop("unit")), _holder(entry.pop("holder"))): _checked(HolderAccount(**entry))
                for entry in data["holders"]
            }
            numbers = {(_holder(key), str(number)): _unit(unit) for key, number, unit in data["numbers"]}
            accounts = {
                _tenant(entry.pop("tenant")): _checked(TenantAccount(**entry)) for entry in data.get("tenants", [])
            }
            past = _past(data)
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as exc:
            return f"the state file has fields of another version: {exc}"
        ledger.restore(units, holders, past.polled if past is not None else None)
        ledger.tenants.restore(accounts, holders)
        self.numbers, self.past = numbers, past
        # Until the first write succeeds, values beyond the file's content must not be published.
        self.written = _counters_of(units, holders, accounts)
        return ""

    def prepare(self, ledger: Ledger, numbers: Numbers = NO_NUMBERS, reported: Sequence[str] = ()) -> Prepared:
        """Returns the next content of the file, made from the ledger's counters.

        - `numbers`: the unit that each device number (Grant.number) of a running holder means, by (holder, number).
        - `reported`: the ends of holders that the sources have reported (Answer.reported).
        """
        units = {unit: record.account for unit, record in ledger.units.items()}
        holders = ledger.holders()
        accounts = ledger.tenants.accounts
        body = json.dumps(
            {
                "boot_id": self._boot_id,
                # The driver counts a unit's energy, so it is not restored.
                "units": [{"unit": unit, **_fields(account), "energy_j": None} for unit, account in units.items()],
                "holders": [
                    {"unit": unit, "holder": key, **_fields(account)} for (unit, key), account in holders.items()
                ],
                "tenants": [{"tenant": key, **_fields(account)} for key, account in accounts.items()],
                "numbers": [(key, number, unit) for (key, number), unit in numbers.items()],
                "reported": list(reported),
                "polled": ledger.polled,
            },
            separators=(",", ":"),
        )
        text = f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}\n{body}"
        return Prepared(text, _counters_of(units, holders, accounts))

    def commit(self, prepared: Prepared) -> None:
        """Writes the file; the caller then calls `adopt`. Raises OSError; the old content then remains valid."""
        write_atomically(self.path, prepared.text.encode(), PRIVATE)

    def adopt(self, prepared: Prepared) -> None:
        """Publishes the counters of this content from now on."""
        self.written = prepared.written

    def bound_unit(self, unit: UnitId, totals: UnitTotals) -> UnitTotals:
        """Returns a unit's totals, limited to the values in the file. They are 0 until the unit is in the file."""
        return self._bound(unit, totals, UNIT_LIMITED)

    def bound_holder(self, unit: UnitId, key: HolderKey, totals: HolderTotals) -> HolderTotals:
        """Returns a holder's totals, limited to the values in the file. They are 0 until the holder is in the file.

        The held time of a Slurm job with a known start is not limited: it counts from that start, so a restart does not
        decrease it.
        """
        is_dated = key.scheduler == "slurm" and not key.incarnation.endswith("/")  # the key ends with the start
        bounded = self._bound((unit, key), totals, HOLDER_LIMITED[1:] if is_dated else HOLDER_LIMITED)
        if not totals.pending_s:
            return bounded
        uncounted_s = bounded.observed_s - (bounded.busy_s + bounded.idle_s + bounded.stalled_s)
        return bounded._replace(pending_s=max(0.0, min(totals.pending_s, uncounted_s)))

    def bound_tenant(self, key: TenantKey, totals: TenantTotals) -> TenantTotals:
        """Returns a tenant's totals, limited to the values in the file. They are 0 until the tenant is in the file."""
        return self._bound(key, totals, TENANT_LIMITED)

    def _bound(self, key: UnitId | tuple[UnitId, HolderKey] | TenantKey, totals: TotalsT, limited: Limited) -> TotalsT:
        written = self.written.get(key, NOT_WRITTEN)
        values: list[Any] = list(totals)
        for place, counter in limited:
            most = written.get(counter, 0.0)
            if values[place] is not None and values[place] > most:
                values[place] = most
        return type(totals)(*values)


def open_state(directory: Path | None, write_interval_s: float, boot_id: str) -> StateFile | None:
    """Opens and locks the state directory. Returns None without a directory, or if this fails.

    Logs the failure, because counters then start at 0 after each restart. Raises StateInUse if another process uses the
    directory.
    """
    if directory is None:
        return None
    state = StateFile(directory, write_interval_s, boot_id)
    try:
        state.acquire()
    except OSError as exc:
        log.warning(
            (
                "%s: %s; the exporter does not use this directory, so counters start at 0 after each restart; set "
                "another --state.directory"
            ),
            directory,
            exc.strerror,
        )
        return None
    return state


AccountT = TypeVar("AccountT", UnitAccount, HolderAccount, TenantAccount)
SCHEDULERS: Mapping[str, Scheduler] = {name: name for name in get_args(Scheduler)}
FLAGS = frozenset(("known", "running", "alone", "is_stalled", "spin_all_known"))
ENDLESS = frozenset(("working", "spin_end"))  # may be infinite


def _unit(value: Any) -> UnitId:
    return UnitId(*_texts(value))


def _holder(value: Any) -> HolderKey:
    scheduler, incarnation = _texts(value)
    if scheduler not in SCHEDULERS:
        raise ValueError(f"{scheduler!r} is not a scheduler")
    return HolderKey(SCHEDULERS[scheduler], incarnation)


def _tenant(value: Any) -> TenantKey:
    if not isinstance(value, list) or len(value) != 4 or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{value!r} is not a tenant")
    return TenantKey(*value)


def _past(data: Mapping[str, Any]) -> PastEnds | None:
    """Returns the ended holders in the file. None before the first complete poll, and in files of earlier versions."""
    reported, polled = data.get("reported"), data.get("polled")
    if reported is None or polled is None:
        return None
    if not isinstance(reported, list) or not all(isinstance(text, str) for text in reported):
        raise ValueError(f"{reported!r:.80} is not a list of texts")
    if not _is_number(polled):
        raise ValueError(f"{polled!r:.80} is not a time")
    return PastEnds(reported, polled + 0.0)


def _texts(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{value!r} is not a list of two strings")
    return value[0], value[1]


def _checked(account: AccountT) -> AccountT:
    """Returns the account. Raises ValueError if one of its values is invalid.

    An invalid value would be published, or would make every later write of the file fail.
    """
    for field in fields(account):
        value = getattr(account, field.name)
        if field.name in FLAGS:
            is_good = isinstance(value, bool)
        elif field.name == "last_active_wall":
            is_good = value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))
            if value is not None and is_good:
                setattr(account, field.name, tuple(value))
        elif value is None:
            is_good = "None" in str(field.type)
        else:
            is_good = _is_number(value) or (field.name in ENDLESS and value == math.inf)
        if not is_good:
            raise ValueError(f"{field.name}: invalid value {value!r}")
    return account


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fields(account: UnitAccount | HolderAccount | TenantAccount) -> dict[str, Any]:
    """Returns the values of an account by name. dataclasses.asdict copies each value, which takes ten times as long."""
    return {name: getattr(account, name) for name in account.__slots__}


def _counters_of(
    units: Mapping[UnitId, UnitAccount],
    holders: Mapping[tuple[UnitId, HolderKey], HolderAccount],
    tenants: Mapping[TenantKey, TenantAccount],
) -> Written:
    written: Written = {tenant: _values(account, TENANT_COUNTERS) for tenant, account in tenants.items()}
    for unit, account in units.items():
        joules = () if account.unattributed_j is None else ("unattributed_j",)
        written[unit] = _values(account, (*UNIT_COUNTERS, *joules))
    for allocation, holder in holders.items():
        joules = () if holder.energy_j is None else ("energy_j",)
        written[allocation] = _values(holder, (*HOLDER_COUNTERS, *joules))
    return written


def _values(account: UnitAccount | HolderAccount | TenantAccount, counters: Iterable[str]) -> dict[str, float]:
    return {counter: getattr(account, counter) for counter in counters}
