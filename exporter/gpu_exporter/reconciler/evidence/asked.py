"""Parses the holder that a user names, in the forms that programs print: full name, name of a pod alone, or GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.reconciler.evidence.records import HolderName

BRACKETS = re.compile(r" \[\d+\]$")  # Slurm's own id, as in `job 3010_1 [3013]`
USERS_JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")

FORMS = (
    "write a pod as NAMESPACE/POD or POD; a job as job/ID, job/ARRAY_TASK or job/LEADER+OFFSET; a GPU as its "
    "UUID, the start of its UUID, or NODE:INDEX"
)
OF_GPUS = ("GPU-", "MIG-")


class Wanted(NamedTuple):
    """The holders to find. One of these is given:

    `pod`: the name of a pod in any namespace.
    `uuid`: a GPU or MIG instance, or the beginning of its UUID.
    `gpu`: the index of a GPU on `node`.
    """

    pod: str = ""
    uuid: str = ""
    node: str = ""
    gpu: str = ""

    def unit(self, labels: Mapping[str, str], host: str) -> str:
        """Returns the UUID of the GPU or MIG instance of a series, if it is wanted; "" for any other series.

        `host`: the exporter of the series, as HOST or HOST:PORT.
        """
        uuids = labels.get("mig_uuid", ""), labels.get("uuid", "")
        if self.uuid:
            return next((each for each in uuids if each.startswith(self.uuid)), "")
        is_wanted = labels.get("pod") == self.pod if self.pod else self._is_place(labels, host)
        return (uuids[0] or uuids[1]) if is_wanted else ""

    def _is_place(self, labels: Mapping[str, str], host: str) -> bool:
        name = host.partition(":")[0]
        nodes = {labels.get("node", ""), host, name, name.partition(".")[0]}
        return labels.get("gpu") == self.gpu and self.node in nodes


def parse_asked(text: str) -> HolderName | Wanted | None:
    """Parses a holder in one of FORMS. None for any other text."""
    text = BRACKETS.sub("", text.strip())
    if text.startswith(OF_GPUS) and ":" not in text:
        return Wanted(uuid=text.rstrip("….").lower().replace(text[:4].lower(), text[:4], 1))
    place, slash, name = text.replace("job ", "job/", 1).partition("/")
    if not slash and USERS_JOB_ID.fullmatch(place):
        return HolderName("slurm", "", place)
    if not slash:
        node, colon, gpu = text.rpartition(":")
        return Wanted(node=node, gpu=gpu) if colon and node else Wanted(pod=text) if text else None
    if place.lower() == "job" and USERS_JOB_ID.fullmatch(name):
        return HolderName("slurm", "", name)
    pod, _, _container = name.partition("/")
    return HolderName("kubernetes", place, pod)
