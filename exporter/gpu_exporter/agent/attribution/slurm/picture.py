"""A picture is the collector's answer for one node, as JSON. Pure. Unknown fields are ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_exporter.agent.attribution.slurm.parse import Job, JobGpus, NodeRecord, SlurmConfig
from gpu_exporter.common.outside import need_real, need_whole, need_wholes
from gpu_exporter.common.slurm.gres import Gres

SCHEMA = 1


class Picture(NamedTuple):
    """The state of one node at `asked_wall` (Unix seconds). The collector renews it every `each_s` seconds.

    `jobs`: the node's jobs by id, including jobs without GPUs.
    """

    asked_wall: float
    each_s: float
    config: SlurmConfig
    node: NodeRecord
    jobs: Mapping[str, tuple[Job, JobGpus]]


def render_picture(picture: Picture) -> str:
    """Returns the JSON text that `parse_picture` reads."""
    config = picture.config
    return json.dumps(
        {
            "schema": SCHEMA,
            "asked": picture.asked_wall,
            "interval": picture.each_s,
            "config": config._asdict()
            | {"private": sorted(config.private), "prolog_flags": sorted(config.prolog_flags)},
            "node": picture.node._asdict() | {"used": picture.node.used._asdict()},
            "jobs": [job._asdict() | {"gpus": gpus._asdict()} for job, gpus in picture.jobs.values()],
        },
        separators=(",", ":"),
    )


def parse_picture(text: str) -> Picture:
    """Parses a collector's answer. Raises ValueError for any other text."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(
                f"the answer has schema {data['schema']!r}, and this exporter reads schema {SCHEMA}: run the same "
                "version of gpu-exporter on the collector and on this node"
            )
        jobs = [(_job(row), _gpus(row["gpus"])) for row in data["jobs"]]
        return Picture(
            need_real(data["asked"]),
            need_real(data["interval"]),
            _config(data["config"]),
            _node(data["node"]),
            {job.job_id: (job, gpus) for job, gpus in jobs},
        )
    except (AttributeError, KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"not an answer of a collector: {type(exc).__name__} {exc}") from exc


def _job(row: dict[str, Any]) -> Job:
    texts = {name: _text(row[name]) for name in Job._fields if name not in ("start", "size")}
    start = row["start"]
    return Job(**texts, start=None if start is None else need_real(start), size=tuple(map(_text, row["size"])))


def _gpus(data: dict[str, Any]) -> JobGpus:
    total = data["total"]
    return JobGpus(
        need_wholes(data["indexes"]),
        None if total is None else need_whole(total),
        need_whole(data["unnamed"]),
        _shared(data["shared"]),
        _text(data["unnamed_share"]),
    )


def _shared(pairs: list[tuple[Any, Any]]) -> tuple[tuple[int, str], ...]:
    return tuple((need_whole(index), _text(kind)) for index, kind in pairs)


def _node(data: dict[str, Any]) -> NodeRecord:
    used, start = data["used"], data["slurmd_start"]
    return NodeRecord(
        tuple((_text(kind), need_whole(count)) for kind, count in data["configured"]),
        Gres(
            need_wholes(used["indexes"]),
            need_whole(used["unnamed"]),
            _shared(used["shared"]),
            _text(used["unnamed_share"]),
        ),
        None if start is None else need_real(start),
        _text(data.get("closed", "")),  # a collector of an earlier version does not know the state
        _text(data.get("reason", "")),
    )


def _config(data: dict[str, Any]) -> SlurmConfig:
    private, flags = (frozenset(map(_text, data[name])) for name in ("private", "prolog_flags"))
    return SlurmConfig(_text(data["cluster"]), _text(data["path"]), _text(data["spool"]), private, flags)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value
