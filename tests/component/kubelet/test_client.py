"""The client: pods that have gone, restarts, errors of the server, and large answers."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path

import grpc
import pytest

from gpu_exporter.agent.attribution.kubelet.grpc_unix import CallError, _unwrap, call
from gpu_exporter.agent.attribution.kubelet.podresources import LIST
from gpu_exporter.agent.attribution.kubelet.source import KubeletSource
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import ManualClock
from tests.component.kubelet.kubelet_bench import UUID, begin
from tests.testbed.podresources import Kubelet


def test_the_client_keeps_nothing_of_pods_that_have_gone(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock, tmp_path: Path
) -> None:
    for number in range(50):
        pod = tmp_path / "pods" / f"ml_pod-{number}_uid-{number}"
        begin(pod / "main", 0, clock.wall())
        kubelet.pods = {("ml", f"pod-{number}"): {"main": {"nvidia.com/gpu": [UUID]}}}
        kubelet.allocatable = [UUID]
        assert source.poll().grants[0].holder.pod_uid == f"uid-{number}"
        shutil.rmtree(pod)
    assert len(source._logs._uids) <= 1
    assert len(source._logs._starts) <= 1


def test_the_client_reconnects_to_a_restarted_kubelet_at_once(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    source.poll()
    kubelet.stop()
    with pytest.raises(SourceError, match="kubelet does not answer"):
        source.poll()
    kubelet.start()
    assert len(source.poll().grants) == 1


def test_a_refusal_contains_the_servers_message(kubelet: Kubelet, source: KubeletSource) -> None:
    kubelet.status = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(SourceError, match="gRPC status 8: rejected by rate limit"):
        source.poll()


def test_a_large_answer_arrives_despite_flow_control(kubelet: Kubelet, source: KubeletSource) -> None:
    for i in range(2_000):
        kubelet.pods["ml", f"pod-{i}-{'x' * 200}"] = {"main": {"nvidia.com/gpu": [UUID]}}
    assert len(source.poll().grants) == 2_000


def test_a_gpu_with_thousands_of_replicas_is_offered_once(
    kubelet: Kubelet, source: KubeletSource, clock: ManualClock
) -> None:
    """8 resources with 16,384 replicas answer 9.7 MB; the first version read 4 MiB and then knew no offers at all."""
    kubelet.allocatable = [f"{UUID[:-1]}{gpu}::{number}" for gpu in range(8) for number in range(16_384)]
    answer = source.poll()
    assert answer.offers is not None and len(answer.offers) == 8 and not answer.notice
    kubelet.allocatable = [f"{UUID}::0"]
    clock.advance(60.0)
    assert source.poll().offers == answer.offers, "so many replicas are not read at every poll"
    clock.advance(60.0)
    assert len(source.poll().offers or ()) == 1


def test_offers_that_are_refused_leave_the_holders_known_and_are_named(
    kubelet: Kubelet, source: KubeletSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.pods["ml", "a"] = {"main": {"nvidia.com/gpu": [UUID]}}
    kubelet.allocatable = [f"{UUID}::{number}" for number in range(50)]
    monkeypatch.setattr("gpu_exporter.agent.attribution.kubelet.grpc_unix.MAX_ANSWER", 1_000)
    answer = source.poll()
    assert len(answer.grants) == 1 and answer.offers is None
    assert "allocatable devices (the answer is larger than 1000 bytes), so gpu_allocatable is absent" in answer.notice
    monkeypatch.undo()
    answer = source.poll()
    assert len(answer.offers or ()) == 1 and not answer.notice


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"\0\0\0\0\x03abc", ""),
        (b"\0\0\0\0\0", ""),
        (b"\1\0\0\0\x03abc", "single uncompressed"),
        (b"\0\0\0\0\x04abc", "single uncompressed"),
        (b"\0\0\0\0\x02abc", "single uncompressed"),
        (b"\0\0\0", "single uncompressed"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 100])
def test_a_body_is_unwrapped_in_chunks_of_any_size(body: bytes, error: str, size: int) -> None:
    parts = _unwrap(body[at : at + size] for at in range(0, len(body), size))
    if error:
        with pytest.raises(CallError, match=error):
            list(parts)
    else:
        assert b"".join(parts) == body[5:]


def test_the_client_gives_up_on_a_server_that_never_answers(tmp_path: Path) -> None:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(CallError, match="timed out|no answer in time"):
            call(str(path), LIST, b"", 0.3)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64], ids=["closed", "http1", "noise"]
)
def test_a_server_with_another_protocol_is_an_error(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def reply() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(CallError):
            call(str(path), LIST, b"", 2.0)
        thread.join()
