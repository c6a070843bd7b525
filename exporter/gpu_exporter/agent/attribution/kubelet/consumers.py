"""Finds the entries of PodResources that use up their device, unlike the entries of monitoring pods with admin access.

A ResourceClaim with `adminAccess` (KEP-5018) is for monitoring: other pods can still get the device. NVIDIA's GPU
operator makes such a claim on every GPU for its dcgm-exporter. PodResources does not report which claims have
adminAccess. The exporter finds these claims in two other sources:

- A setting in which the administrator names the namespace and the pods that watch. A tenant can choose a pod's name,
  but cannot put a pod into another tenant's namespace.
- The checkpoint file of the DRA driver, if it is mounted. It contains the claims' allocations.

If two claims have the same device, and neither source shows which of them watches, resolve.py marks both as doubtful.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.kubelet.podresources import ContainerDevices
from gpu_exporter.common.files import read_named
from gpu_exporter.common.model.holders import RESERVATION_NAMESPACES
from gpu_exporter.common.outside import load_json

log = logging.getLogger(__name__)
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
CHECKPOINT = "checkpoint.json"  # in the folder of the driver's kubelet plugin
CHECKPOINT_MAX = 8 * 1024 * 1024  # a node with 16 GPUs and 100 claims: about 300 KiB
CLAIM_UID = re.compile(r".*=([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-.+")  # in the name of a claim's CDI device


# (claim, device) -> driver -> whether the claim only watches. A claim is a UID or NAMESPACE/NAME. Two drivers may use
# the same device name.
Watches: TypeAlias = "dict[tuple[str, str], dict[str, bool]]"


class Monitor(NamedTuple):
    """Pods of one namespace whose claims only watch."""

    namespace: str
    pod: re.Pattern[str]


def parse_monitor(text: str) -> Monitor:
    """Parses `NAMESPACE/POD`. Only POD is a regular expression. Raises ValueError."""
    namespace, slash, pod = text.partition("/")
    if not (slash and pod and NAMESPACE.fullmatch(namespace)):
        raise ValueError(
            f"--attribution.monitor: {text!r}: expected NAMESPACE/POD, with the full name of a namespace and a "
            "regular expression for the whole name of a pod, e.g. gpu-operator/nvidia-dcgm-exporter-.*"
        )
    try:
        return Monitor(namespace, re.compile(pod))
    except re.error as exc:
        raise ValueError(f"--attribution.monitor: {pod!r} is not a regular expression: {exc}") from exc


def check_namespace(name: str) -> str:
    """Returns `name` if it can be the full name of a namespace. Raises ValueError for any other text."""
    if not NAMESPACE.fullmatch(name):
        raise ValueError(
            f"--attribution.reservation: {name!r}: expected the full name of a namespace, e.g. "
            f"{RESERVATION_NAMESPACES[0]}, not a pattern"
        )
    return name


class Consumers:
    """Separates entries that hold their device from entries that only watch it."""

    def __init__(self, monitors: Sequence[Monitor] = (), plugin: Path | None = None) -> None:
        """`plugin`: folder of the DRA driver's kubelet plugin, None to ignore it."""
        self._monitors = monitors
        self._checkpoint = _Checkpoint(plugin / CHECKPOINT) if plugin is not None else None

    def select(self, entries: Iterable[ContainerDevices]) -> list[ContainerDevices]:
        """Returns the entries that may use up their device. Omits entries that provably only watch their device.

        `proven` of a returned entry is True if the entry provably uses up its device.
        """
        if self._checkpoint is not None:
            self._checkpoint.refresh()
        judged = ((entry, self._consumes(entry)) for entry in entries)
        return [entry._replace(proven=bool(consumes)) for entry, consumes in judged if consumes is not False]

    def _consumes(self, entry: ContainerDevices) -> bool | None:
        """Returns whether the entry uses up its device, None if unknown."""
        if not entry.claimed:
            return True  # a device plugin allocates the device
        if any(entry.namespace == each.namespace and each.pod.fullmatch(entry.pod) for each in self._monitors):
            return False
        return self._checkpoint.consumes(entry) if self._checkpoint is not None else None


class _Checkpoint:
    """The DRA driver's checkpoint file, which lists its claims, in the format of driver 25.8 (`v1`) or later (`v2`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._watches: Watches = {}
        self._problem = ""

    def consumes(self, entry: ContainerDevices) -> bool | None:
        """Returns whether the claim uses up its device, None if the checkpoint file does not show it."""
        uids = {match[1] for name in entry.cdi if (match := CLAIM_UID.fullmatch(name))}
        device = "".join(entry.device_ids[:1])
        known = [claim for claim in uids if (claim, device) in self._watches]
        # The file may still have a deleted claim of the same name, so the UID is looked up first.
        drivers = [self._watches.get((claim, device), {}) for claim in known or [entry.claim]]
        said = {watches for each in drivers for driver, watches in each.items() if entry.resource in ("", driver)}
        return not said.pop() if len(said) == 1 else None

    def refresh(self) -> None:
        """Reads the file if it has changed. If the file cannot be read, every claim is unknown."""
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            watches = _read_watches(load_json(read_named(self._path, CHECKPOINT_MAX).decode("utf-8")))
        except FileNotFoundError:
            self._stamp, self._watches, problem = None, {}, ""  # the driver has prepared no claim, or does not run here
        except (OSError, ValueError, RecursionError) as exc:
            self._stamp, self._watches, problem = None, {}, str(exc)
        else:
            self._stamp, self._watches, problem = stamp, watches, ""
        if problem and problem != self._problem:
            log.warning(
                "%s: cannot read the DRA driver's checkpoint (%s), so claims that only watch a GPU are unknown: name "
                "their pods with --attribution.monitor",
                self._path,
                problem,
            )
        self._problem = problem


def _read_watches(data: Any) -> Watches:
    """Returns for each claim whether it only watches its device. Keys: its UID, and NAMESPACE/NAME if the file has
    names.

    `data`: the parsed checkpoint file. Its `status` is the API's ResourceClaimStatus, with `adminAccess` in the
    allocation results. Raises ValueError.
    """
    claims = _get(data, "v2", "preparedClaims") or _get(data, "v1", "preparedClaims")
    if claims is None and not (_is_version(data, "v1") or _is_version(data, "v2")):
        raise ValueError("the file has neither v1 nor v2, the supported versions")
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
                    # Two requests of one claim may name one device: a request that takes the device decides.
                    drivers = watches.setdefault((each, device), {})
                    drivers[driver] = bool(admin) and drivers.get(driver, True)
    return watches


def _is_version(data: Any, name: str) -> bool:
    return isinstance(_get(data, name), dict)


def _get(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data
