"""Finds the holders of exporters that do not report now, in the last hour of a PromQL API.

Prometheus remembers, so a restarted reconciler knows the same. Each cycle makes one query, and two more if an exporter
has stopped.
"""

from __future__ import annotations

from gpu_exporter.common.model.holders import ALLOCATION_KEY, PROCESS_SOURCE
from gpu_exporter.reconciler.evidence.matchers import Asked, match_any
from gpu_exporter.reconciler.evidence.records import SEEN_S, Unseen, holder_name, is_hidden

EXPORTERS_MAX = 500  # exporters whose holders are read, by one or two queries: each reads all present holders too
PLACE = "node, instance"
HOLDER = "scheduler, namespace, pod, job_id, pod_uid, identity"


def read_unseen(asked: Asked) -> tuple[Unseen, ...]:
    """Returns the holders that silent exporters last showed. Raises AnswerError.

    A holder counts as seen if any exporter shows it on the same GPU: a node may have two targets, and an exporter that
    restarts may get another address.
    """
    builds = asked.select("gpu_exporter_build_info")
    past = f"last_over_time({builds}[{SEEN_S:g}s])"
    silent = sorted(
        (row.labels.get("node", ""), row.labels.get("instance", ""))
        for row in asked.query(f"count by ({PLACE}) ({past} unless on ({PLACE}) {builds})")
    )[:EXPORTERS_MAX]
    found: set[Unseen] = set()
    shown = f"on ({', '.join(ALLOCATION_KEY)}) {asked.select('gpu_allocation_info')}"
    for instances in match_any("instance", (instance for _, instance in silent)):
        held = asked.select("gpu_allocation_info", instances, f'source!="{PROCESS_SOURCE}"')
        rows = asked.query(f"count by ({PLACE}, {HOLDER}) (last_over_time({held}[{SEEN_S:g}s]) unless {shown})")
        starts: dict[tuple[str, str], str] = {}
        if any(row.labels.get("scheduler") == "slurm" for row in rows):
            begun = asked.select("gpu_allocation_start_timestamp_seconds", instances, 'scheduler="slurm"')
            for row in asked.query(f"max by (instance, job_id) (last_over_time({begun}[{SEEN_S:g}s]))"):
                starts[row.labels.get("instance", ""), row.labels.get("job_id", "")] = f"{row.value:.0f}"
        for labels in (row.labels for row in rows):
            name, instance = holder_name(labels), labels.get("instance", "")
            if (labels.get("node", ""), instance) in silent and name.name and not is_hidden(labels):
                incarnation = labels.get("pod_uid", "") or starts.get((instance, name.name), "")
                found.add(Unseen(labels.get("node", "") or instance, name, incarnation))
    return tuple(sorted(found))
