"""Which sources are asked: the sources that the administrator requests, otherwise the sources that this host has; and
their precedence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.agent.attribution import registry
from gpu_exporter.agent.attribution.registry import SourceOptions, find_sources
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA

OPTIONS = SourceOptions(
    timeout_s=5.0,
    empty_confirm_s=5.0,
    static=None,
    kubelet=None,
    kubelet_socket=Path("/nowhere/kubelet.sock"),
    kubelet_logs=Path("/nowhere"),
    resources=(),
    slurm=None,
    slurm_node="n0",
    slurm_gres_conf=None,
    slurm_interval_s=60.0,
    slurm_job_files=None,
    slurm_collected=None,
    procfs=Path("/proc"),
    monitors=(),
    reservations=(),
    claims=None,
    pod_uid="",
    find_pods=None,
    state=None,
    keeps_state=True,
)


@pytest.mark.parametrize("has_socket", [False, True])
@pytest.mark.parametrize("has_slurm", [False, True])
@pytest.mark.parametrize("kubelet", [None, False, True])
@pytest.mark.parametrize("slurm", [None, False, True])
@pytest.mark.parametrize("static", [False, True])
def test_requested_sources_are_asked_and_otherwise_the_sources_of_the_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_socket: bool,
    has_slurm: bool,
    kubelet: bool | None,
    slurm: bool | None,
    static: bool,
) -> None:
    socket = tmp_path / "pod-resources" / "kubelet.sock"
    if has_socket:
        socket.parent.mkdir()
    monkeypatch.setattr(registry, "is_slurm_node", lambda: has_slurm)
    options = OPTIONS._replace(
        static=tmp_path / "holders.yaml" if static else None, kubelet=kubelet, kubelet_socket=socket, slurm=slurm
    )
    expected = ["static"] if static else []
    expected += ["kubelet"] if (has_socket if kubelet is None else kubelet) else []
    expected += ["slurm"] if (has_slurm if slurm is None else slurm) else []
    assert [source.name for source in find_sources(options, ManualClock(), NVIDIA)] == expected


def test_an_invalid_expression_for_resources_is_refused() -> None:
    options = OPTIONS._replace(kubelet=True, slurm=False, resources=("example.com/(",))
    with pytest.raises(ValueError, match=r"example\.com/\("):
        find_sources(options, ManualClock(), NVIDIA)
