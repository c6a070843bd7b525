"""Sends requests to the API server. Answers are plain JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.files import read_named
from gpu_exporter.common.outside import load_json, parse_http_date, whole
from gpu_exporter.common.plain import REASON_MAX, describe_yaml, one_line
from gpu_exporter.reconciler.evidence.clocks import ahead_of, describe_disagreement
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, OBJECT_MAX, TOO_LARGE, ListReader, NotJson, Odd
from gpu_exporter.reconciler.marks import MarkError

log = logging.getLogger(__name__)
Json: TypeAlias = dict[str, Any]
T = TypeVar("T")
TIMEOUT_S = 10.0  # for a connection, and for each part of an answer
ANSWER_S = 30.0  # for a whole answer
CHUNK = 64 * 1024
MIB = 1024 * 1024
KUBECONFIG_MAX = MIB  # bytes; the client itself reads a file of any size and kind
ODD_NAMES_MAX = 1000  # names of odd objects that are remembered, so that each is logged once
# Ask for the metadata only, of one object and of a list (kubernetes.io/docs/reference/using-api/api-concepts).
METADATA = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
METADATA_LIST = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
LONG = 64 * MIB  # bytes: a list beyond this size takes long even from a fast server
SEND_MAX = 256 * 1024  # bytes of an unused answer that are read, so that the connection can be reused
NOT_JSON = "API server: its answer is not JSON; is there a proxy in between?"
PAGE = 500  # objects per answer
PATIENCE_MAX_S = 600.0  # the longest Retry-After that is obeyed


def connect(kubeconfig: str = "") -> Api:
    """Connects to the API server of this pod's service account, or of a kubeconfig. Raises MarkError that names the
    missing part.
    """
    settings = client.Configuration()
    settings.retries = False  # urllib3 would sleep for the whole Retry-After; the next cycle retries instead
    try:
        if kubeconfig:
            for path in kubeconfig.split(os.pathsep):
                with contextlib.suppress(FileNotFoundError):  # the client skips it, unless all are missing
                    read_named(Path(path).expanduser(), KUBECONFIG_MAX)
            load_kube_config(kubeconfig, client_configuration=settings)
        else:
            load_incluster_config(settings)
        return Api(client.ApiClient(settings))
    except YAMLError as exc:
        raise MarkError("error", f"cannot connect to the API server: {kubeconfig}: {describe_yaml(exc)}") from exc
    except (ConfigException, OSError) as exc:
        raise MarkError("error", f"cannot connect to the API server: {exc}") from exc
    except (ValueError, TypeError, AttributeError, LookupError) as exc:  # their texts quote the file
        why = f"{kubeconfig or 'service account'}: not a kubeconfig ({type(exc).__name__})"
        raise MarkError("error", f"cannot connect to the API server: {why}") from exc


def is_in_cluster() -> bool:
    """Returns whether this process has the service account of a pod."""
    try:
        load_incluster_config(client.Configuration())
    except ConfigException:
        return False
    return True


class OddAnswer(MarkError):
    """The API server answered with a malformed or too large object. `reason`: one of REASONS."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__("error", text)
        self.reason = reason


class Budget:
    """The limits of one list."""

    def __init__(self, length: int, until: float, clock: Clock) -> None:
        """`length`: the most bytes to read. `until`: when the time limit ends (monotonic seconds)."""
        self._length = self._left = length
        self._until = until
        self._clock = clock

    def spend(self, length: int) -> None:
        """Counts bytes that were read. Raises MarkError above the length limit, or after the time limit."""
        self._left -= length
        if self._left < 0:
            raise MarkError("size", f"the list is longer than {self._length // MIB} MiB")
        if self._clock.monotonic() > self._until:
            # If the list is not long, the server is slow.
            result = "size" if self._length - self._left > LONG else "error"
            raise MarkError(result, "the list was not read within its time limit")

    @property
    def is_spent(self) -> bool:
        """Whether a limit has been reached."""
        return self._left < 0 or self._clock.monotonic() > self._until


class Api:
    """Requests to one API server. Every request may raise MarkError."""

    def __init__(self, connection: client.ApiClient) -> None:
        self.core = client.CoreV1Api(connection)
        self.events = client.EventsV1Api(connection)
        self.discovery = client.DiscoveryV1Api(connection)
        self.autoscaling = client.AutoscalingV2Api(connection)
        self.coordination = client.CoordinationV1Api(connection)
        self.custom = client.CustomObjectsApi(connection)
        self.groups = client.ApisApi(connection)
        self.odd: Counter[tuple[str, str]] = Counter()
        """How often an object was left out, by its kind and one of REASONS."""
        self._odd_names: set[tuple[str, str]] = set()
        self._ahead_s = 0.0  # how far the reconciler's clock is ahead, by the last answer
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # held while a whole object is in memory

    @property
    def clock_fault(self) -> str:
        """How far the clocks of reconciler and server differed at the last answer, in words; "" if they agreed."""
        return describe_disagreement(self._ahead_s, "the API server")

    def call(
        self,
        function: Any,
        *arguments: Any,
        timeout_s: float = TIMEOUT_S,
        keep: Callable[[Json], Json] = lambda found: found,
        **options: Any,
    ) -> Json:
        """Sends one request by a function of the client. Returns JSON, because typed objects would need ten times the
        memory.

        `keep`: extracts the needed part of a large answer. Raises MarkError. This is an OddAnswer if the answer is
        longer than OBJECT_MAX, or if `keep` fails.
        """
        parts: list[bytes] = []
        left = OBJECT_MAX
        for chunk in self._request(function, *arguments, timeout_s=timeout_s, **options):
            parts.append(chunk)
            left -= len(chunk)
            if left < 0:
                raise OddAnswer(TOO_LARGE, f"API server: its answer is longer than {OBJECT_MAX // MIB} MiB")
        with self._one_at_a_time:
            try:
                found = load_json(b"".join(parts).decode("utf-8", "replace"))
            except RecursionError as exc:
                raise OddAnswer(MALFORMED, "API server: its answer is nested too deeply") from exc
            except ValueError as exc:
                raise MarkError("error", NOT_JSON) from exc
            try:
                return keep(found)
            except Odd as exc:
                raise OddAnswer(exc.reason, f"API server: {exc}") from exc
            except Exception as exc:  # an object may contain anything
                why = f"API server: its answer cannot be parsed ({type(exc).__name__})"
                raise OddAnswer(MALFORMED, why) from exc

    def send(self, function: Any, *arguments: Any, **options: Any) -> None:
        """Sends one request, and checks only the status of the answer. Raises MarkError."""
        chunks = self._request(function, *arguments, **options)
        length = 0
        for chunk in chunks:
            length += len(chunk)
            if length > SEND_MAX:
                break
        chunks.close()

    def read_metadata(self, namespace: str, pod: str) -> Json:
        """Reads only the metadata of a pod that is too large to be read completely. Raises MarkError."""
        chunks = self._request(self.core.read_namespaced_pod, pod, namespace, _headers=METADATA)
        try:
            return ListReader(chunks, lambda found: found, lambda *_: None, self._one_at_a_time).metadata()
        except NotJson as exc:
            raise OddAnswer(MALFORMED, f"API server: {exc}") from exc
        finally:
            chunks.close()

    def pages(
        self,
        function: Any,
        *arguments: Any,
        kind: str,
        keep: Callable[[Json], T],
        odd: Callable[[str, str, str], None] | None = None,
        most: Budget | None = None,
        **options: Any,
    ) -> Iterator[T]:
        """Yields the result of `keep` for each object of a list. The pages are read as a stream.

        `kind`: the kind of the objects.
        `keep`: extracts the needed part. If it raises an exception, the object is omitted, logged and counted, like a
        too large object.
        `odd`: called for every omitted object, with its name, one of REASONS, and the reason in words.
        `most`: the limits of the list.
        """

        def report(name: str, reason: str, why: str) -> None:
            self._note_odd(kind, name, reason, why)
            if odd is not None:
                odd(name, reason, why)

        token: str | None = None
        while True:
            chunks = self._request(function, *arguments, most=most, limit=PAGE, _continue=token, **options)
            page = ListReader(chunks, keep, report, self._one_at_a_time)
            try:
                yield from page
            except NotJson as exc:
                raise MarkError("error", f"{NOT_JSON} ({exc})") from exc
            finally:
                chunks.close()
            token = page.token
            if not token:
                return

    def _request(
        self,
        function: Any,
        *arguments: Any,
        timeout_s: float = TIMEOUT_S,
        most: Budget | None = None,
        **options: Any,
    ) -> Generator[bytes, None, None]:
        """Yields the bytes of an answer as they arrive. Raises MarkError for an error, and after the time limit."""
        left_s = max(timeout_s, ANSWER_S)  # only waiting for the server counts, not the use of its answer
        asked_wall = time.time()
        try:
            response = function(*arguments, _preload_content=False, _request_timeout=timeout_s, **options)
        except ApiException as exc:  # raised by some releases of the client, which have already read the answer
            raise failure(exc.status or 0, _text(exc.body), _patience(exc.headers)) from exc
        except (HTTPError, OSError) as exc:
            raise MarkError("error", f"API server: {exc}") from exc
        said_wall = parse_http_date(response.headers.get("Date"))
        if said_wall is not None:
            self._ahead_s = ahead_of(said_wall, asked_wall, time.time(), resolution_s=1.0)
        try:
            if not 200 <= response.status < 300:
                raise failure(response.status, _head(response), _patience(response.headers))
            while True:
                began = time.monotonic()
                chunk = response.read1(CHUNK)
                left_s -= time.monotonic() - began
                if not chunk:
                    return
                if left_s < 0.0:
                    raise MarkError("error", f"API server: no complete answer within {ANSWER_S:.0f} s")
                if most is not None:
                    most.spend(len(chunk))
                yield chunk
        except (HTTPError, OSError) as exc:
            raise MarkError("error", f"API server: {exc}") from exc
        finally:
            response.close()  # after a complete answer the connection is already back in the pool

    def _note_odd(self, kind: str, name: str, reason: str, why: str) -> None:
        """Counts an omitted object. Logs it once."""
        with self._lock:
            self.odd[kind, reason] += 1
            is_new = (kind, name) not in self._odd_names
            if len(self._odd_names) >= ODD_NAMES_MAX:
                self._odd_names.clear()
            self._odd_names.add((kind, name))
        if is_new:
            log.warning("the reconciler ignores %s %s: %s", kind, one_line(name) or "without a name", why)


def _head(response: Any) -> str:
    """Reads the beginning of an error answer."""
    body = b""
    while len(body) < CHUNK and (chunk := response.read1(CHUNK)):
        body += chunk
    return _text(body)


def _text(body: Any) -> str:
    return body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)


def _patience(headers: Any) -> str:
    return str((headers or {}).get("Retry-After", ""))


def failure(status: int, text: str, retry_after: str = "") -> MarkError:
    """Makes a MarkError of an answer other than 2xx. `retry_after`: the header Retry-After, in seconds.

    After a 404 that names the object, the object is gone. The API server also answers 404 for an unknown kind or
    version. Then nothing is known about the object.
    """
    try:
        answer = json.loads(text)
        message = str(answer.get("message", text))
        details = answer.get("details") or {}
        fields = [cause.get("field") for cause in details.get("causes") or ()]
        names_object = bool(details.get("name"))
    except (ValueError, AttributeError, RecursionError):
        message, fields, names_object = text, [], False  # throttling is answered in plain text
    results = {404: "replaced" if names_object else "error", 409: "conflict", 429: "throttled"}
    result = "replaced" if status == 422 and "metadata.uid" in fields else results.get(status, "error")
    patience_s = min(whole(retry_after) or 0, PATIENCE_MAX_S) if result == "throttled" else 0.0
    return MarkError(result, f"API server: status {status}: {one_line(message, REASON_MAX)}", patience_s, status)
