"""Which entries of PodResources consume their device: an administrator's claim only watches it.

A request of a ResourceClaim with `adminAccess` (KEP-5018) is for monitors: it takes nothing away from others, and
NVIDIA's GPU operator makes such a claim on every GPU for its dcgm-exporter. PodResources does not say which claims do.
Two things say it: the namespace and name of their pods, which an administrator sets (a tenant may name a pod as it
likes, but not put it into another's namespace); and the checkpoint file of the DRA driver, where that is mounted, which
has the claims' allocations. Two claims on one device that neither of these tells apart are doubted later (resolve.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.attribution.kubelet.podresources import ContainerDevices
from gpu_exporter.outside import load_json

log = logging.getLogger(__name__)
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
CHECKPOINT = "checkpoint.json"  # in the folder of the driver's kubelet plugin
CHECKPOINT_MAX = 8 * 1024 * 1024  # a node of 16 GPUs and 100 claims: some 300 KiB
CLAIM_UID = re.compile(r".*=([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-.+")  # in the name of a CDI device of a claim


# By claim (its UID, or NAMESPACE/NAME) and device: by driver, whether it only watches. Two drivers may use one name.
Watches: TypeAlias = "dict[tuple[str, str], dict[str, bool]]"


class Monitor(NamedTuple):
    """Pods of one namespace whose claims only watch."""

    namespace: str
    pod: re.Pattern[str]


def parse_monitor(text: str) -> Monitor:
    """`NAMESPACE/POD`, with a regular expression for the pod's name alone. Raises ValueError."""
    namespace, slash, pod = text.partition("/")
    if not (slash and pod and NAMESPACE.fullmatch(namespace)):
        raise ValueError(
            f"--attribution.monitor: {text!r} is not NAMESPACE/POD, with the namespace's full name and a regular "
            "expression for the pod's, e.g. gpu-operator/nvidia-dcgm-exporter-.*"
        )
    try:
        return Monitor(namespace, re.compile(pod))
    except re.error as exc:
        raise ValueError(f"--attribution.monitor: {pod!r} is not a regular expression: {exc}") from exc


class Consumers:
    """Tells entries that hold their device from those that watch it."""

    def __init__(self, monitors: Sequence[Monitor] = (), plugin: Path | None = None) -> None:
        """`plugin`: folder of the DRA driver's kubelet plugin, None where it is not to be read."""
        self._monitors = monitors
        self._checkpoint = _Checkpoint(plugin / CHECKPOINT) if plugin is not None else None

    def select(self, entries: Iterable[ContainerDevices]) -> list[ContainerDevices]:
        """The entries that are not known to watch; `proven` says of a claim that it consumes its device."""
        if self._checkpoint is not None:
            self._checkpoint.refresh()
        judged = ((entry, self._consumes(entry)) for entry in entries)
        return [entry._replace(proven=bool(consumes)) for entry, consumes in judged if consumes is not False]

    def _consumes(self, entry: ContainerDevices) -> bool | None:
        """None where nothing says it."""
        if not entry.claimed:
            return True  # a device plugin gives a device away
        if any(entry.namespace == each.namespace and each.pod.fullmatch(entry.pod) for each in self._monitors):
            return False
        return self._checkpoint.consumes(entry) if self._checkpoint is not None else None


class _Checkpoint:
    """What the driver has written of the claims that it prepared, in the form of driver 25.8 (`v1`) or later (`v2`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._watches: Watches = {}
        self._problem = ""

    def consumes(self, entry: ContainerDevices) -> bool | None:
        """Whether the claim takes the device; None where the file does not say."""
        uids = {match[1] for name in entry.cdi if (match := CLAIM_UID.fullmatch(name))}
        device = "".join(entry.device_ids[:1])
        known = [claim for claim in uids if (claim, device) in self._watches]
        # A claim of the same name that was deleted may still be in the file: the UID comes first.
        drivers = [self._watches.get((claim, device), {}) for claim in known or [entry.claim]]
        said = {watches for each in drivers for driver, watches in each.items() if entry.resource in ("", driver)}
        return not said.pop() if len(said) == 1 else None

    def refresh(self) -> None:
        """Read the file where it has changed. One that cannot be read says nothing of any claim."""
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            with self._path.open("rb") as file:
                data = file.read(CHECKPOINT_MAX + 1)
            if len(data) > CHECKPOINT_MAX:
                raise ValueError(f"it has more than {CHECKPOINT_MAX} bytes")
            watches = _read_watches(load_json(data.decode("utf-8")))
        except FileNotFoundError:
            self._stamp, self._watches, problem = None, {}, ""  # the driver has prepared nothing, or is not here
        except (OSError, ValueError, RecursionError) as exc:
            self._stamp, self._watches, problem = None, {}, str(exc)
        else:
            self._stamp, self._watches, problem = stamp, watches, ""
        if problem and problem != self._problem:
            log.warning("%s: cannot be read, so it is unknown which claims only watch: %s", self._path, problem)
        self._problem = problem


def _read_watches(data: Any) -> Watches:
    """What each claim does, by UID, and by NAMESPACE/NAME where that is there.

    `status` is the API's ResourceClaimStatus, whose allocation results have `adminAccess`. Raises ValueError.
    """
    claims = _get(data, "v2", "preparedClaims") or _get(data, "v1", "preparedClaims")
    if claims is None and not (_is_version(data, "v1") or _is_version(data, "v2")):
        raise ValueError("it has neither v1 nor v2, the supported versions")
    watches: Watches = {}
    for uid, claim in claims.items() if isinstance(claims, dict) else ():
        results = _get(claim, "status", "allocation", "devices", "results")
        names = [uid]
        namespace, name = _get(claim, "namespace"), _get(claim, "name")
        if isinstance(namespace, str) and isinstance(name, str) and namespace and name:
            names.append(f"{namespace}/{name}")
        for result in results if isinstance(results, list) else ():
            driver, device, admin = (_get(result, key) for key in ("driver", "device", "adminAccess"))
            if isinstance(device, str) and (admin is None or isinstance(admin, bool)):
                driver = driver if isinstance(driver, str) else ""
                for each in names:
                    # Two requests of one claim may name one device: taking it is what counts.
                    drivers = watches.setdefault((each, device), {})
                    drivers[driver] = bool(admin) and drivers.get(driver, True)
    return watches


def _is_version(data: Any, name: str) -> bool:
    return isinstance(_get(data, name), dict)


def _get(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data
