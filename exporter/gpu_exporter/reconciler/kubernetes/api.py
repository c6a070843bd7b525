"""Requests to the API server, answered in plain JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from gpu_exporter.clock import Clock
from gpu_exporter.reconciler.marks import MarkError

Json: TypeAlias = dict[str, Any]
TIMEOUT_S = 10.0
PAGE = 500  # objects of one answer
PATIENCE_MAX_S = 600.0  # a server that asks for more is asked again all the same


def connect(kubeconfig: str = "") -> Api:
    """The API server of this pod's service account, or of a kubeconfig. Raises MarkError that says what is missing."""
    settings = client.Configuration()
    settings.retries = False  # urllib3 would sleep as long as a Retry-After says; the next cycle is the retry
    try:
        if kubeconfig:
            load_kube_config(kubeconfig, client_configuration=settings)
        else:
            load_incluster_config(settings)
        return Api(client.ApiClient(settings))
    except (ConfigException, OSError, ValueError, TypeError, YAMLError) as exc:
        raise MarkError("error", f"no way to the API server: {exc}") from exc


def is_in_cluster() -> bool:
    """Whether this process has a service account to speak with."""
    try:
        load_incluster_config(client.Configuration())
    except ConfigException:
        return False
    return True


class Budget:
    """What one list may cost."""

    def __init__(self, characters: int, until: float, clock: Clock) -> None:
        """`until`: monotonic seconds."""
        self._characters = characters
        self._until = until
        self._clock = clock

    def spend(self, characters: int) -> None:
        """Raise MarkError once more was read than may be, or for longer."""
        self._characters -= characters
        if self._characters < 0 or self._clock.monotonic() > self._until:
            raise MarkError("size", "the list is too long to be read at once")


class Api:
    """One API server. Every request may raise MarkError."""

    def __init__(self, connection: client.ApiClient) -> None:
        self.core = client.CoreV1Api(connection)
        self.events = client.EventsV1Api(connection)
        self.discovery = client.DiscoveryV1Api(connection)
        self.autoscaling = client.AutoscalingV2Api(connection)
        self.coordination = client.CoordinationV1Api(connection)
        self.custom = client.CustomObjectsApi(connection)
        self.groups = client.ApisApi(connection)

    def call(
        self,
        function: Any,
        *arguments: Any,
        timeout_s: float = TIMEOUT_S,
        on_size: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Json:
        """One request by a function of the client, whose typed objects would cost ten times the memory.

        `on_size`: is told how many characters the answer has.
        """
        try:
            response = function(*arguments, _preload_content=False, _request_timeout=timeout_s, **options)
            status, body, headers = response.status, response.data, response.headers
        except ApiException as exc:
            status, body, headers = exc.status or 0, exc.body, exc.headers
        except (HTTPError, OSError) as exc:
            raise MarkError("error", f"API server: {exc}") from exc
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
        if 200 <= status < 300:
            try:
                answer: Json = json.loads(text)
            except (ValueError, RecursionError) as exc:
                raise MarkError("error", "API server: its answer is not JSON; is there a proxy in between?") from exc
            if on_size is not None:
                on_size(len(text))
            return answer
        raise failure(status, text, str((headers or {}).get("Retry-After", "")))

    def pages(self, function: Any, *arguments: Any, most: Budget | None = None, **options: Any) -> Iterator[Json]:
        """Every object of a list, read page by page. `most`: what it may cost in all, None for any."""
        token: str | None = None
        sized: dict[str, Any] = {} if most is None else {"on_size": most.spend}
        while True:
            page = self.call(function, *arguments, limit=PAGE, _continue=token, **sized, **options)
            yield from page.get("items") or ()
            token = page["metadata"].get("continue") or None
            if not token:
                return


def failure(status: int, text: str, retry_after: str = "") -> MarkError:
    """What an answer of the API server other than 2xx means; `retry_after`: seconds, as its header says.

    A 404 means that the object is gone only where the answer names an object. A kind or version that is not served has
    a 404 too, and says nothing about the object.
    """
    try:
        answer = json.loads(text)
        message = str(answer.get("message", text))
        details = answer.get("details") or {}
        fields = [cause.get("field") for cause in details.get("causes") or ()]
        names_object = bool(details.get("name"))
    except (ValueError, AttributeError, RecursionError):
        message, fields, names_object = text, [], False  # throttling answers in plain text
    results = {404: "replaced" if names_object else "error", 409: "conflict", 429: "throttled"}
    result = "replaced" if status == 422 and "metadata.uid" in fields else results.get(status, "error")
    patience_s = min(float(retry_after), PATIENCE_MAX_S) if result == "throttled" and retry_after.isdecimal() else 0.0
    return MarkError(result, f"API server: status {status}: {message[:300]}", patience_s, status)
