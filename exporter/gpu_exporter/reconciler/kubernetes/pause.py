"""A pause in the annotations of a Lease, as whoever asks for one reads and writes it."""

from __future__ import annotations

from gpu_exporter.reconciler.kubernetes.api import Api
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.pause import PauseNote, PauseUnreadable, note_facts, parse_note


class LeasePause:
    """Of one Lease, whose holder reads it with each renewal."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._title = f"Lease {namespace}/{name}"

    def read_pause(self) -> PauseNote | None:
        """As PausePlace."""
        try:
            lease = self._api.call(self._api.coordination.read_namespaced_lease, self._name, self._namespace)
        except MarkError as exc:
            if exc.result == "replaced":
                return None
            raise PauseUnreadable(f"{self._title}: {exc}") from exc
        return parse_note(lease["metadata"].get("annotations") or {}, self._title)

    def write_pause(self, note: PauseNote) -> None:
        """As PausePlace; a Lease that is not there yet is made, held by nobody."""
        metadata = {"annotations": note_facts(note)}
        try:
            self._api.call(
                self._api.coordination.patch_namespaced_lease, self._name, self._namespace, {"metadata": metadata}
            )
        except MarkError as exc:
            if exc.result != "replaced":
                raise
            body = {"metadata": {**metadata, "name": self._name, "namespace": self._namespace}, "spec": {}}
            self._api.call(self._api.coordination.create_namespaced_lease, self._namespace, body)
