"""A real Kubernetes control plane on loopback: etcd, kube-apiserver, controller manager and, on request, scheduler."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.testbed.node import program
from tests.testbed.pki import Authority
from tests.testbed.processes import Processes, Running, free_port, wait_for


class ControlPlane:
    """A control plane. After construction the default ServiceAccount exists, so pods can be created."""

    def __init__(self, processes: Processes, directory: Path, scheduler: bool = False) -> None:
        self._processes = processes
        self._directory = directory
        self.authority = Authority(directory / "pki")
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.admin = self.authority.kubeconfig("admin", self.url, "admin", "system:masters")
        self.node = self.authority.kubeconfig("node", self.url, "system:node:node1", "system:nodes")
        self.etcd_url = self._start_etcd()
        self._sign_key = self.authority.write_key("service-accounts")
        self._server_certificate = self.authority.issue("apiserver", "kube-apiserver")
        self._kubelet_client = self.authority.issue("kubelet-client", "apiserver", "system:masters")
        self.apiserver = self.start_apiserver()
        self._start_manager()
        if scheduler:
            self._start_component("kube-scheduler", [])
        self.api = self.connect(self.admin)
        self.core = client.CoreV1Api(self.api)
        wait_for(self._has_default_account, "the default ServiceAccount")

    @staticmethod
    def connect(kubeconfig: Path) -> client.ApiClient:
        """The public Kubernetes client with this kubeconfig."""
        return config.new_client_from_config(str(kubeconfig))

    def _start_etcd(self) -> str:
        url, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self._processes.start(
            [
                program("etcd"),
                f"--data-dir={self._directory / 'etcd'}",
                f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ]
        )
        return url

    def start_apiserver(self) -> Running:
        """Start the API server, also after it was stopped, and wait until it is ready."""
        ca = self.authority.certificate
        certificate, key = self._server_certificate
        kubelet_certificate, kubelet_key = self._kubelet_client
        running = self._processes.start(
            [
                program("kube-apiserver"),
                "--bind-address=127.0.0.1",
                f"--secure-port={self.port}",
                "--advertise-address=127.0.0.1",
                "--endpoint-reconciler-type=none",  # Endpoints refuse loopback addresses
                f"--etcd-servers={self.etcd_url}",
                f"--client-ca-file={ca}",
                f"--tls-cert-file={certificate}",
                f"--tls-private-key-file={key}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={self._sign_key.with_suffix('.pub')}",
                f"--service-account-signing-key-file={self._sign_key}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--allow-privileged=true",
                f"--kubelet-client-certificate={kubelet_certificate}",
                f"--kubelet-client-key={kubelet_key}",
            ]
        )
        context = ssl.create_default_context(cafile=str(ca))

        def is_ready() -> bool:
            assert running.process.poll() is None, running.log()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=2, context=context) as answer:
                    return bool(answer.read() == b"ok")
            except (urllib.error.URLError, OSError):
                return False

        wait_for(is_ready, "the API server to be ready")
        return running

    def _start_manager(self) -> None:
        ca = self.authority.directory / "ca"
        self._start_component(
            "kube-controller-manager",
            [
                f"--root-ca-file={ca}.crt",
                f"--service-account-private-key-file={self._sign_key}",
                f"--cluster-signing-cert-file={ca}.crt",
                f"--cluster-signing-key-file={ca}.key",
                "--use-service-account-credentials=true",
            ],
        )

    def _start_component(self, name: str, flags: list[str]) -> None:
        kubeconfig = self.authority.kubeconfig(name, self.url, f"system:{name}")
        files = [f"--{prefix}kubeconfig={kubeconfig}" for prefix in ("", "authentication-", "authorization-")]
        ports = ["--bind-address=127.0.0.1", f"--secure-port={free_port()}", "--leader-elect=false"]
        self._processes.start([program(name), *files, *ports, *flags])

    def _has_default_account(self) -> bool:
        try:
            self.core.read_namespaced_service_account("default", "default", _request_timeout=5)
        except (ApiException, HTTPError):
            return False
        return True

    def has_account(self, namespace: str) -> bool:
        """Whether the namespace has its ServiceAccount, so that pods can be created."""
        accounts = self.core.list_namespaced_service_account(namespace, _request_timeout=30).items
        return any(account.metadata.name == "default" for account in accounts)

    def create_pod(self, manifest: dict[str, Any]) -> str:
        """Create a pod; returns its UID."""
        namespace = manifest["metadata"].get("namespace", "default")
        return str(self.core.create_namespaced_pod(namespace, manifest, _request_timeout=10).metadata.uid)

    def pod(self, name: str, namespace: str = "default") -> dict[str, Any]:
        """The pod as the API returns it."""
        return dict(self.api.sanitize_for_serialization(self.core.read_namespaced_pod(name, namespace)))

    def events(self, namespace: str, pod: str) -> list[tuple[str, str]]:
        """Reason and note of a pod's Events in order. Read as JSON, since the client refuses Events of the kubelet."""
        answer = client.EventsV1Api(self.api).list_namespaced_event(namespace, _preload_content=False)
        items = [item for item in json.loads(answer.data)["items"] if item["regarding"].get("name") == pod]
        items.sort(key=lambda item: item.get("eventTime") or item["metadata"]["creationTimestamp"])
        return [(item["reason"], item.get("note", "")) for item in items]

    def define(self, *kinds: tuple[str, str, str, str], schema: dict[str, Any] | None = None) -> None:
        """Serve these kinds, each (group, version, plural, kind), without their controllers.

        `schema`: of the whole object; None accepts any object.
        """
        free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        custom = client.CustomObjectsApi(self.api)
        for group, version, plural, kind in kinds:
            names = {"plural": plural, "kind": kind, "singular": kind.lower()}
            served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema or free}}
            spec = {"group": group, "names": names, "scope": "Namespaced", "versions": [served]}
            approval = {"api-approved.kubernetes.io": "unapproved, for tests"}  # the API server asks for it in *.k8s.io
            body = {"metadata": {"name": f"{plural}.{group}", "annotations": approval}, "spec": spec}
            client.ApiextensionsV1Api(self.api).create_custom_resource_definition(body)

        def is_served(group: str, version: str, plural: str) -> bool:
            try:
                return bool(custom.list_cluster_custom_object(group, version, plural))
            except ApiException:
                return False

        for group, version, plural, _ in kinds:
            wait_for(lambda group=group, version=version, plural=plural: is_served(group, version, plural), plural)  # type: ignore[misc]


@contextmanager
def start_control_plane(processes: Processes, directory: Path, scheduler: bool = False) -> Iterator[ControlPlane]:
    """A ControlPlane; its connections are closed afterwards, its processes end with the test."""
    plane = ControlPlane(processes, directory, scheduler)
    try:
        yield plane
    finally:
        plane.api.close()
