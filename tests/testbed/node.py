"""A real node in a sandbox: containerd and kubelet, alone or joined to a control plane.

The settings that matter, and their reasons, as measured on Debian 12 with a hybrid cgroup hierarchy: cgroup v2 is not
required, no iptables, no swap check, one cgroup root of the tests; pods get a network namespace with only lo.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.testbed.device_plugin import DevicePlugin
from tests.testbed.images import PAUSE, write_pause_image
from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.programs import QUICK, build
from tests.testbed.sandbox import Inside, Sandbox
from tests.testbed.servers import require
from tests.testbed.stubs import compile_stubs

NODE = "node1"
CNI = """#!/bin/sh
[ "$CNI_COMMAND" != ADD ] || nsenter --net="$CNI_NETNS" ip link set lo up
case "$CNI_COMMAND" in
VERSION) echo '{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0"]}' ;;
ADD) echo '{"cniVersion":"0.4.0","interfaces":[{"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}],
"ips":[{"version":"4","address":"127.0.0.1/8","interface":0}]}' ;;
esac
"""


def program(name: str) -> Path:
    """A built Go program. If it cannot be built, the test is skipped with the reason; in CI it fails. `make test` builds
    nothing, so a test without one of the marks of tests.conftest.LONG fails.
    """
    assert not QUICK.is_set(), f"a quick test needs {name}: give it the mark servers, slurm, kubelet or kubernetes"
    try:
        return build(name)
    except RuntimeError as exc:
        assert not os.environ.get("CI"), str(exc)
        pytest.skip(str(exc))


class Node:
    """One node, `node1`. Paths are as the test sees them; inside the sandbox they are the usual paths."""

    def __init__(self, sandbox: Sandbox, kubeconfig: Path | None, uuids: Sequence[str]) -> None:
        self.sandbox = sandbox
        self._kubeconfig = kubeconfig
        scratch = sandbox.scratch
        self.root = scratch / "var-lib" / "kubelet"
        self.pod_resources = self.root / "pod-resources" / "kubelet.sock"
        self.pod_logs = scratch / "var-log" / "pods"
        self.manifests = scratch / "manifests"
        self.port = free_port()
        self._socket = "/run/containerd.sock"
        self.manifests.mkdir()
        self._configure()
        self._containerd = sandbox.start(["containerd", "--config", scratch / "containerd.toml"])
        wait_for(self._containerd_answers, "containerd to answer")
        write_pause_image(scratch / "pause.tar")
        self.import_image(scratch / "pause.tar")
        self.plugin = DevicePlugin(self.root / "device-plugins", uuids)
        self._kubelet: Inside | None = None

    def _containerd_answers(self) -> bool:
        assert self._containerd.is_alive(), self._containerd.log()
        command = self.sandbox.command("ctr", "--address", self._socket, "version")
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def ctr(self, *arguments: str | Path) -> str:
        """Run containerd's client in the namespace that the kubelet uses."""
        return self.sandbox.run("ctr", "--address", self._socket, "--namespace", "k8s.io", *arguments)

    def import_image(self, archive: Path) -> None:
        """Load a docker-archive or OCI archive."""
        self.ctr("images", "import", archive)

    def _configure(self) -> None:
        scratch = self.sandbox.scratch
        (scratch / "cni").mkdir()
        (scratch / "cni-conf").mkdir()
        for name in ("lo-only", "loopback"):  # containerd itself adds the second name
            (scratch / "cni" / name).write_text(CNI)
            (scratch / "cni" / name).chmod(0o755)
        network = {"cniVersion": "0.4.0", "name": "lo-only", "plugins": [{"type": "lo-only"}]}
        (scratch / "cni-conf" / "10-lo.conflist").write_text(json.dumps(network))
        (scratch / "containerd.toml").write_text(
            f"""version = 2
root = "{scratch}/containerd"
state = "/run/containerd-state"
[grpc]
address = "{self._socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{scratch}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{scratch}/cni"
conf_dir = "{scratch}/cni-conf"
"""
        )
        joined = self._kubeconfig is not None
        settings: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": self.port,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": free_port(),
            "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": not joined}, "webhook": {"enabled": joined}},
            "authorization": {"mode": "Webhook" if joined else "AlwaysAllow"},
            "staticPodPath": str(self.manifests),
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.sandbox.name}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "volumePluginDir": str(scratch / "volume-plugins"),
            "fileCheckFrequency": "1s",
            "syncFrequency": "5s",
            "nodeStatusUpdateFrequency": "2s",
        }
        (scratch / "kubelet.json").write_text(json.dumps(settings))

    def start_kubelet(self, register: bool = True) -> None:
        """Start the kubelet, and register the device plugin unless `register` is false."""
        command: list[str | Path] = [
            program("kubelet"),
            f"--config={self.sandbox.scratch / 'kubelet.json'}",
            f"--hostname-override={NODE}",
            "--cert-dir=/var/lib/kubelet/pki",
            "--v=1",
        ]
        if self._kubeconfig is not None:
            command.append(f"--kubeconfig={self._kubeconfig}")
        started = self._kubelet = self.sandbox.start(command)
        socket = self.root / "device-plugins" / "kubelet.sock"
        # The old socket of a killed kubelet remains; the new kubelet creates its own.
        old = self.pod_resources.stat().st_ctime_ns if self.pod_resources.exists() else 0

        def listens() -> bool:
            assert started.is_alive(), started.log()[-3000:]
            new = self.pod_resources.exists() and self.pod_resources.stat().st_ctime_ns != old
            return socket.exists() and new

        wait_for(listens, "the kubelet's sockets")
        if register:
            self.plugin.register()

    def stop_kubelet(self, with_signal: int = signal.SIGKILL) -> None:
        """End the kubelet; containers keep running. Its device-plugin socket remains, as after a crash."""
        assert self._kubelet is not None
        self._kubelet.stop(with_signal)
        (self.root / "device-plugins" / "kubelet.sock").unlink(missing_ok=True)

    def pods(self) -> list[dict[str, Any]]:
        """The pods of a stand-alone kubelet, from its own /pods; empty while it does not answer."""
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{self.port}/pods", timeout=30, context=context) as answer:
                items: list[dict[str, Any]] | None = json.load(answer)["items"]
        except OSError:
            return []
        return items or []

    def list_pod_resources(self) -> list[str]:
        """The pods that PodResources lists with a device, read by the real gRPC client."""
        pb, pb_grpc = compile_stubs("podresources")
        with grpc.insecure_channel(f"unix:{self.pod_resources}") as channel:
            answer = pb_grpc.PodResourcesListerStub(channel).List(pb.ListPodResourcesRequest(), timeout=30)
        return [pod.name for pod in answer.pod_resources if any(each.devices for each in pod.containers)]

    def allocatable(self) -> set[str]:
        """The resources of which the kubelet can allocate devices."""
        pb, pb_grpc = compile_stubs("podresources")
        with grpc.insecure_channel(f"unix:{self.pod_resources}") as channel:
            stub = pb_grpc.PodResourcesListerStub(channel)
            answer = stub.GetAllocatableResources(pb.AllocatableResourcesRequest(), timeout=30)
        return {each.resource_name for each in answer.devices}

    def print_logs(self) -> None:
        """Print the ends of the pods' logs, for a failed test."""
        for path in sorted(self.pod_logs.glob("*/*/*.log")):
            text = path.read_text("utf-8", "replace")
            print(f"--- end of {path.relative_to(self.pod_logs)}\n{text[-3000:]}", file=sys.stderr)

    def close(self) -> None:
        self.plugin.stop()
        if self._kubelet is not None:
            self._kubelet.stop(signal.SIGKILL)


def static_pod(name: str, gpus: int, seconds: int | None = None, **metadata: Any) -> dict[str, Any]:
    """A pod `train` that holds GPUs for `seconds`, or until it is ended."""
    container: dict[str, Any] = {
        "name": "train",
        "image": PAUSE,
        "imagePullPolicy": "Never",
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {},
    }
    if seconds is not None:
        container["args"] = [str(seconds)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }


@contextmanager
def start_node(
    processes: Processes, uuids: Sequence[str], kubeconfig: Path | None = None, programs: Sequence[str] = ()
) -> Iterator[Node]:
    """A node with these GPUs and a started kubelet; it is removed completely afterwards."""
    require("containerd", "ctr", "runc", "nsenter", "unshare", "gcc", *programs)
    program("kubelet")
    sandbox = Sandbox(processes)
    try:
        if kubeconfig is not None:
            kubeconfig = Path(shutil.copy(kubeconfig, sandbox.scratch / "kubeconfig"))
        node = Node(sandbox, kubeconfig, uuids)
        try:
            node.start_kubelet()
            yield node
        except BaseException:
            node.print_logs()
            raise
        finally:
            node.close()
    finally:
        sandbox.close()
