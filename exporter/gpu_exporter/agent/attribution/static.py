"""Reads holders from a file that a site's prolog writes, or from a simulation's scenario.

The file is YAML or JSON, a list of entries. Each entry has `uuid` and either `pod` (namespace/pod/container) or `job`.
Optional keys are user, account, partition, and `gpus`: the holder's total number of GPUs on all nodes. Without `gpus`,
this number is known only for pods, and the reconciler does not judge the job.

A restart of the exporter resets the counters of these holders to 0, because a pod or job with the same name may be new.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.common.config.values import unknown_key
from gpu_exporter.common.files import open_named, read_within
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.plain import describe_yaml

FILE_MAX = 4 * 2**20  # bytes
SETTLED_S = 1.0
TEXT_KEYS = ("uuid", "pod", "job", "user", "account", "partition")


class CallbackSource:
    """Gets its grants from a function. A simulation reports its holders through this source."""

    def __init__(self, name: str, read_grants: Callable[[], Sequence[Grant]]) -> None:
        self.name = name
        self._read_grants = read_grants

    def poll(self) -> Answer:
        return Answer(count_units(self._read_grants()))


class StaticSource:
    """Reads a file at every poll. Changed content counts after two polls have read the same bytes.

    Until then the earlier content counts, because a program may still be writing the file. In an incomplete list, held
    GPUs would look free.
    """

    name = "static"

    def __init__(self, path: Path, settled_s: float = SETTLED_S) -> None:
        """`settled_s`: seconds for which the file must be unchanged before the first poll uses it."""
        self._path, self._settled_s = path, settled_s
        self._seen: bytes | None = None
        self._parsed: bytes | None = None
        self._grants: list[Grant] = []

    def poll(self) -> Answer:
        import yaml  # only sites with such a file need the parser

        try:
            data = self._look()
            if data is not None:
                self._parsed = None  # if parsing fails, no content counts
                self._grants = parse_static(yaml.safe_load(_whole(data)))
                self._parsed = data
        except yaml.YAMLError as exc:
            raise SourceError(f"{self._path}: {describe_yaml(exc)}") from exc
        except (OSError, ValueError) as exc:
            raise SourceError(f"{self._path}: {exc}") from exc
        except RecursionError as exc:
            raise SourceError(f"{self._path}: the file is nested too deeply; it must be a list of entries") from exc
        return Answer(self._grants)

    def _look(self) -> bytes | None:
        """Returns the file's new content, None if unchanged. Raises OSError, ValueError if no content counts yet."""
        seen, (data, age_s) = self._seen, self._read()
        if seen is None and not self._settled_s <= age_s:  # also if the file is dated in the future
            time.sleep(self._settled_s)
            seen, (data, _) = data, self._read()
        self._seen = data
        if seen in (None, data):
            return data if data != self._parsed else None
        if self._parsed is None:
            raise ValueError("the file is being written; the exporter reads it again at the next poll")
        return None

    def _read(self) -> tuple[bytes, float]:
        """Returns the content, and the seconds since the file was changed."""
        with open_named(self._path) as file:
            return read_within(file, self._path, FILE_MAX), time.time() - os.fstat(file.fileno()).st_ctime


def _whole(data: bytes) -> str:
    """Decodes the file. Raises ValueError if it is empty or its last line is incomplete (a full disk)."""
    text = data.decode("utf-8")
    if not text.strip():
        raise ValueError("the file is empty: write [] if no GPU has a holder")
    if not text.endswith("\n") and text.rstrip()[-1] not in "]}":
        raise ValueError("the last line is incomplete: end the file with a line break")
    return text


def count_units(grants: Sequence[Grant]) -> list[Grant]:
    """Sets each holder's total number of units, if unknown, to the number of units in its grants. Returns the grants.

    Several replicas (UUID::N) of a unit count once.
    """
    held = Counter(key for key, _ in {(grant.holder.key, grant.device.partition("::")[0]) for grant in grants})
    return [
        grant
        if grant.holder.units is not None
        else grant._replace(holder=grant.holder._replace(units=held[grant.holder.key]))
        for grant in grants
    ]


def parse_static(data: object) -> list[Grant]:
    """Returns the grants of the entries. Raises ValueError, whose text contains the entry and the error."""
    if not isinstance(data, list):
        raise ValueError(f"expected a list of entries, not {type(data).__name__}")
    grants: list[Grant] = []
    for position, entry in enumerate(data):
        if not isinstance(entry, dict):
            raise ValueError(f"[{position}]: expected a mapping, not {type(entry).__name__}")
        known = (*TEXT_KEYS, "gpus")
        if unknown := sorted(set(map(str, entry)) - set(known)):
            raise ValueError(unknown_key(f"[{position}]: {unknown[0]!r}", unknown[0], known))
        for key in TEXT_KEYS:  # with YAML anchors, str() of nested lists may need more memory than the host has
            if not isinstance(entry.get(key, ""), (str, int)):
                raise ValueError(f"[{position}]: {key}: expected a string, not {type(entry[key]).__name__}")
        texts = {key: str(entry.get(key, "")) for key in TEXT_KEYS}
        if not texts["uuid"] or bool(texts["pod"]) == bool(texts["job"]):
            raise ValueError(f"[{position}]: needs uuid and exactly one of pod and job")
        gpus = entry.get("gpus")
        if gpus is not None and not (isinstance(gpus, int) and gpus > 0):
            raise ValueError(f"[{position}]: gpus: expected a whole number above 0, not {gpus!r}")
        grants.append(Grant("uuid", texts["uuid"], static_holder(texts, "static", "name")._replace(units=gpus)))
    # a pod is on one node; a job may be on several nodes
    pods = count_units([grant for grant in grants if grant.holder.pod])
    return [*pods, *(grant for grant in grants if not grant.holder.pod)]


def static_holder(texts: dict[str, str], source: str, identity: str) -> Holder:
    """Returns a holder made from `pod` (namespace/pod/container) or `job` (a job id). Raises ValueError."""
    user, account, partition = (texts.get(key, "") for key in ("user", "account", "partition"))
    if texts.get("job"):
        key = HolderKey("slurm", texts["job"])
        return Holder(
            key,
            job_id=texts["job"],
            user=user,
            account=account,
            partition=partition,
            source=source,
            identity=identity,
        )
    parts = texts["pod"].split("/")
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"pod: expected namespace/pod/container, not {texts['pod']!r}")
    return Holder(
        HolderKey("kubernetes", texts["pod"]),
        namespace=parts[0],
        pod=parts[1],
        container=parts[2],
        user=user,
        account=account,
        partition=partition,
        source=source,
        identity=identity,
    )
