"""Decides which of several reconcilers writes: the replica that holds a Lease of coordination.k8s.io.

As in client-go's leader election, a replica takes a Lease that has not changed for the duration in the Lease. Each
replica measures by its own monotonic clock, so the clocks of hosts need not agree. Unlike in client-go, the holder
checks before each write that its last renewal is younger than RENEW_DEADLINE_S. So a process that was suspended writes
nothing when it continues.

The API server refuses a request that arrives late, because marks carry the pod's resourceVersion, and withdrawals its
UID.
"""

from __future__ import annotations

import copy
import logging
import secrets
import socket
import threading

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.outside import whole
from gpu_exporter.common.plain import describe_bug, utc
from gpu_exporter.common.service import repeat
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start
from gpu_exporter.reconciler.kubernetes.client.api import Api, Json, connect
from gpu_exporter.reconciler.marks import PREFIX, MarkError
from gpu_exporter.reconciler.pause import PauseNote, PauseUnreadable, note_facts, parse_note

log = logging.getLogger(__name__)
# client-go's defaults: LeaseDuration, RenewDeadline, RetryPeriod.
LEASE_S = 15
RENEW_DEADLINE_S = 10.0
RETRY_S = 2.0
RECORD_SUFFIX = "-record"
LATE_S = 60.0  # without a turn: a turn has three requests at most
REQUEST_S = 4.0  # time limit of a renewal, so that another one fits before the deadline


def open_lease(kubeconfig: str, place: str, clock: Clock) -> Lease:
    """Returns the Lease at NAMESPACE/NAME. Raises ValueError, MarkError."""
    return Lease(connect(kubeconfig), *split_place(place), clock)


def open_record(kubeconfig: str, place: str) -> LeaseTexts:
    """Returns the Lease NAMESPACE/NAME-record, which stores texts and has no holder. Raises ValueError, MarkError."""
    namespace, name = split_place(place)
    return LeaseTexts(connect(kubeconfig), namespace, f"{name}{RECORD_SUFFIX}")


def open_pause(kubeconfig: str, place: str) -> LeasePause:
    """Returns a LeasePause that reads and writes the pause stored in the Lease NAMESPACE/NAME. Does not acquire the
    Lease. Raises ValueError, MarkError.
    """
    return LeasePause(connect(kubeconfig), *split_place(place))


def split_place(place: str) -> tuple[str, str]:
    """Splits NAMESPACE/NAME into namespace and name. Raises ValueError."""
    namespace, slash, name = place.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise ValueError(f"--kubernetes.lease {place!r}: write it as NAMESPACE/NAME")
    return namespace, name


class Lease:
    """One Lease that this process holds or waits for."""

    def __init__(self, api: Api, namespace: str, name: str, clock: Clock, identity: str = "") -> None:
        """`identity`: the name of this process; by default random, so a restarted process has another identity."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self.identity = identity or f"{socket.gethostname()}_{secrets.token_hex(4)}"
        self._lock = threading.Condition()
        self._writing = (
            threading.Lock()
        )  # one thread at a time writes the Lease: each write needs the answer to the last one
        self._renewed: float | None = None  # when the last successful renewal was sent (monotonic)
        self._held: Json | None = None  # the Lease as this process last wrote it, while it holds the Lease
        self._seen: tuple[object, ...] = ()  # what another holder last wrote ...
        self._seen_at = 0.0  # ... and when this process first saw it (monotonic)
        self._annotations: Json = {}  # of the Lease as it was last seen
        self._is_released = False
        self._trouble = ""
        self.task = Task("lease", LATE_S)

    def may_write(self) -> bool:
        """Returns whether this process certainly holds the Lease."""
        with self._lock:
            return self._may_write()

    def _may_write(self) -> bool:
        renewed = self._renewed
        return renewed is not None and self._clock.monotonic() - renewed < RENEW_DEADLINE_S

    def read_pause(self) -> PauseNote | None:
        """See PausePlace.read_pause. Uses the last answer, which is at most RENEW_DEADLINE_S old while this process
        holds the Lease.
        """
        return parse_note(self._annotations, f"Lease {self._namespace}/{self._name}")

    def describe(self) -> str:
        """Returns the reason why this process does not hold the Lease."""
        place = f"Lease {self._namespace}/{self._name}"
        if self._trouble:
            return f"{place}: {self._trouble}"
        return f"{self._seen[0]} holds {place}" if self._seen else f"{place}: the API server has not answered yet"

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` until this process holds the Lease. Returns whether it does."""
        with self._lock:
            return self._lock.wait_for(self._may_write, seconds)

    def keep(self, stop: threading.Event) -> None:
        """Takes and renews the Lease in a separate thread until `stop`. Raises NoThread."""

        args = (self.tick, RETRY_S, stop, self.task)
        start(threading.Thread(target=repeat, args=args, name=self.task.name, daemon=True))

    def read_text(self, key: str) -> str:
        """See TextPlace.read_text. Reads an annotation from the API server's last answer.

        Only the Lease's holder writes this annotation.
        """
        return str(self._annotations.get(PREFIX + key, ""))

    def write_text(self, key: str, text: str) -> None:
        """See TextPlace.write_text. Writes together with a renewal, so that only the holder of the Lease can write."""
        with self._writing:
            for _ in range(2):  # a pause may have been written since the last renewal
                began = self._clock.monotonic()
                with self._lock:
                    held = copy.deepcopy(self._held) if self._may_write() else None
                if held is None:
                    break
                held["metadata"].setdefault("annotations", {})[PREFIX + key] = text
                held["spec"] |= {"renewTime": self._now()}
                try:
                    written = self._put(held)
                except MarkError as exc:
                    if exc.result != "conflict":
                        raise
                    self._see(self._take(began), began, "")
                else:
                    self._see(written, began, "")
                    return
        raise MarkError("fenced", f"this reconciler does not hold the Lease {self._namespace}/{self._name}")

    def tick(self) -> None:
        """Renews the Lease, or takes it if its holder has not renewed it in time. Raises nothing."""
        with self._writing:
            self._tick()

    def _tick(self) -> None:
        began = self._clock.monotonic()
        try:
            held = self._renew() if self._held is not None else self._take(began)
            trouble = ""
        except MarkError as exc:
            # Another replica was quicker, the Lease was edited or deleted, or a renewal by this process has arrived
            # after its timeout: read the Lease again.
            if exc.result in ("conflict", "replaced"):
                held, trouble = None, ""
            else:
                held, trouble = self._held, str(exc)
        except Exception as exc:
            self.task.note(exc)
            held, trouble = self._held, describe_bug(exc)
        if trouble != self._trouble:
            needs = "; the reconciler needs `get` and `update` on this Lease, and `create` on leases"
            log.warning(
                "lease %s/%s: %s",
                self._namespace,
                self._name,
                trouble + needs if trouble else "can be read and updated again",
            )
            self._trouble = trouble
        self._see(held, began, trouble)

    def _see(self, held: Json | None, began: float, trouble: str) -> None:
        """Notes the answer to a request. `held`: the Lease; None if another holds it. `began`: monotonic seconds."""
        with self._lock:
            was = self._renewed is not None
            self._held = held if not self._is_released else None
            if held is not None:
                self._annotations = held["metadata"].get("annotations") or {}
            if self._held is None:
                self._renewed = None
            elif not trouble:
                self._renewed = began
            if was != (self._renewed is not None):
                log.info("lease %s/%s %s by %s", self._namespace, self._name, "lost" if was else "held", self.identity)
            self._lock.notify_all()

    def release(self) -> None:
        """Stops writing, and lets another replica take the Lease immediately. Raises nothing."""
        with self._lock:
            held, self._held, self._renewed, self._is_released = self._held, None, None, True
        if held is None:
            return
        held["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._now()}
        try:
            self._put(held)
        except MarkError as exc:
            log.warning("lease %s/%s not released: %s", self._namespace, self._name, exc)

    def _renew(self) -> Json:
        held = copy.deepcopy(self._held)
        assert held is not None
        held["spec"] |= {"renewTime": self._now()}
        return self._put(held)

    def _take(self, now: float) -> Json | None:
        """Takes the Lease. Returns the written Lease; None while another process holds it. Raises MarkError."""
        try:
            found = self._api.call(
                self._api.coordination.read_namespaced_lease, self._name, self._namespace, timeout_s=REQUEST_S
            )
        except MarkError as exc:
            if exc.result != "replaced":
                raise
            metadata = {"name": self._name, "namespace": self._namespace, "annotations": self._annotations}
            body = {"metadata": metadata, "spec": self._spec(0)}  # a pause survives if the Lease is deleted
            return self._api.call(
                self._api.coordination.create_namespaced_lease, self._namespace, body, timeout_s=REQUEST_S
            )
        self._annotations = found["metadata"].get("annotations") or {}  # a pause counts for every replica
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime"), found["metadata"].get("resourceVersion"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        lasts_s = whole(spec.get("leaseDurationSeconds")) or LEASE_S
        if holder not in ("", self.identity) and now - self._seen_at < lasts_s:
            return None
        found["spec"] = self._spec((whole(spec.get("leaseTransitions")) or 0) + (holder != self.identity))
        return self._put(found)

    def _spec(self, transitions: int) -> Json:
        now = self._now()
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_S,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _put(self, lease: Json) -> Json:
        """Replaces the Lease, unless its resourceVersion has changed since it was read. Raises MarkError."""
        return self._api.call(
            self._api.coordination.replace_namespaced_lease, self._name, self._namespace, lease, timeout_s=REQUEST_S
        )

    def _now(self) -> str:
        moment = utc(self._clock.wall())  # MicroTime needs a fraction of a second
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseTexts:
    """A second Lease that only stores long texts, so that renewals of the first Lease stay small."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._seen: Json | None = None

    def read_text(self, key: str) -> str:
        read = self._api.coordination.read_namespaced_lease
        try:
            self._seen = self._api.call(read, self._name, self._namespace, timeout_s=REQUEST_S)
        except MarkError as exc:
            if exc.result != "replaced":
                raise
            self._seen = None
            return ""
        return str((self._seen["metadata"].get("annotations") or {}).get(PREFIX + key, ""))

    def write_text(self, key: str, text: str) -> None:
        """See TextPlace.write_text. Raises MarkError (`conflict`) if another process wrote after the last read."""
        coordination = self._api.coordination
        if self._seen is None:
            metadata = {"name": self._name, "namespace": self._namespace, "annotations": {PREFIX + key: text}}
            body: Json = {"metadata": metadata, "spec": {}}
            made = coordination.create_namespaced_lease
            self._seen = self._api.call(made, self._namespace, body, timeout_s=REQUEST_S)
            return
        body = copy.deepcopy(self._seen)
        body["metadata"].setdefault("annotations", {})[PREFIX + key] = text
        put = coordination.replace_namespaced_lease
        self._seen = self._api.call(put, self._name, self._namespace, body, timeout_s=REQUEST_S)


class LeasePause:
    """The pause in the annotations of one Lease. The holder of this Lease reads it with each renewal."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._title = f"Lease {namespace}/{name}"

    def read_pause(self) -> PauseNote | None:
        try:
            read = self._api.coordination.read_namespaced_lease
            notes = self._api.call(read, self._name, self._namespace, keep=_annotations)
        except MarkError as exc:
            if exc.result == "replaced":
                return None
            raise PauseUnreadable(f"{self._title}: {exc}") from exc
        return parse_note(notes, self._title)

    def write_pause(self, note: PauseNote) -> None:
        """See PausePlace.write_pause. If the Lease is missing, creates it without a holder."""
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


def _annotations(found: Json) -> Json:
    return dict(found["metadata"].get("annotations") or {})
