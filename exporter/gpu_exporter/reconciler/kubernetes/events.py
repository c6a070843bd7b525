"""Writes Events of the reconciler, which `kubectl describe` shows to users."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Mapping

from gpu_exporter.common.plain import utc
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.marks import PREFIX, MarkError

log = logging.getLogger(__name__)
CONTROLLER = PREFIX + "reconciler"
NOTE_MAX = 1024  # bytes; the API server refuses longer ones


class EventWriter:
    """Writes Events to one API server."""

    def __init__(self, api: Api, instance: str = "") -> None:
        """`instance`: the name of this reconciler, if there are several; by default the name of its host."""
        self._api = api
        self._instance = instance or socket.gethostname()

    def record(self, regarding: Mapping[str, str], wall: float, reason: str, note: str) -> None:
        """Writes an Event on an object. A failure is only logged, because the Event is not essential.

        `regarding`: apiVersion, kind, namespace, name and uid of the object.
        """
        try:
            self._create(regarding, wall, reason, note, "Mark", secrets.token_hex(6))
        except MarkError as exc:
            log.warning("cannot write an Event for %s/%s: %s", regarding["namespace"], regarding["name"], exc)

    def record_once(self, regarding: Mapping[str, str], wall: float, reason: str, note: str, ident: str) -> None:
        """Like `record`, but writes only one Event for each `ident`: later calls write nothing. Raises MarkError."""
        try:
            self._create(regarding, wall, reason, note, "TakeBack", ident)
        except MarkError as exc:
            if exc.result != "conflict":  # the Event exists already
                raise

    def _create(
        self, regarding: Mapping[str, str], wall: float, reason: str, note: str, action: str, ident: str
    ) -> None:
        # MicroTime needs a fraction of a second, which the client leaves out when it is 0.
        moment = utc(wall)
        moment = moment.replace(microsecond=max(1, moment.microsecond))
        namespace, name = regarding["namespace"], regarding["name"]
        event = {
            "metadata": {"name": f"{name[:230].rstrip('.-')}.{ident}", "namespace": namespace},
            "eventTime": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": action,
            "reason": reason,
            "type": "Normal",
            "note": note.encode()[:NOTE_MAX].decode("utf-8", "ignore"),
            "regarding": dict(regarding),
        }
        self._api.call(self._api.events.create_namespaced_event, namespace, event)
