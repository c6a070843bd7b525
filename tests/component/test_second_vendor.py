"""GPUs of another vendor: a backend of forty lines works with the whole exporter, and no other file mentions it.

Only the backend and vendor.py know NVIDIA's ids, resources, device files, PCI vendor, and names of calls and errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.agent.attribution.slurm.gres.conf import order_of, parse_gres_conf
from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import Device, EventWatch, Memory, Rates
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.text import TextRenderer
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.agent.runtime.surroundings import Host
from gpu_exporter.common.clock import SystemClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import Vendor
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import wait_for

ACME = Vendor(
    name="Acme",
    resource=re.compile(r"acme\.example/(npu|part-.+)"),
    replica=re.compile(r"/slice\d+$"),
    device_id=re.compile(r"acme:[0-9a-f]{4}"),
    numbered_id=re.compile(r"npu(?P<minor>\d+)(?P<instance>never)?"),
    unfaithful_id=re.compile(r"(?!)"),
    cdi_id=re.compile(r"acme\.example/npu=(?P<name>.+)"),
    claim_driver=re.compile(r"npu\.acme\.example"),
    claim_device=re.compile(r"npu-(?P<minor>\d+)(?P<profile>never)?(?P<placed>never)?(?P<plain>never)?"),
    claim_elsewhere=re.compile(r"(?!)"),
    monitors=(),
    device_file=re.compile(r"/dev/npu/(\d+)"),
    device_major=226,
    device_file_name="/dev/npu/N",
    capability_file=re.compile(r"(?!)"),
    autodetect=frozenset(("acme",)),
    pci_vendor="0xacce",
    kernel_driver="acmenpu",
    visible_variable="ACME_VISIBLE_DEVICES",
)
ADDRESS = "0000:{:02x}:00.0"


class AcmeDevice(Device):
    """A device with utilization, memory and power, and a call that always fails."""

    def __init__(self, index: int) -> None:
        self.identity = DeviceIdentity(index, f"acme:{index:04x}", "Acme N1", "1.0", ADDRESS.format(16 + index), index)
        self.answers = 0

    def read_utilization(self) -> Rates:
        self.answers += 1
        return Rates(0.0 if self.identity.index else 0.75, None)

    def read_memory(self) -> Memory:
        return Memory(total=64 * 2**30, used=2**30, free=63 * 2**30, reserved=None)

    def read_power(self) -> float:
        return 80.0

    def read_power_limit(self) -> float:
        return 400.0

    def read_temperature(self) -> float:
        raise DeviceError("acme_read_heat", "ACME_E_SENSOR")


class AcmeBackend:
    name = "acme"
    vendor = ACME
    is_live = True

    def open(self) -> None: ...

    def count(self) -> int:
        return 2

    def find(self, position: int) -> Device:
        return AcmeDevice(position)

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        raise NotSupported("acme_events", "ACME_E_NONE")

    def close(self) -> None: ...


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Three boards of Acme, the last of which belongs to a virtual machine, and one board of NVIDIA."""
    for index, (vendor, driver) in enumerate(
        [("0xacce", "acmenpu"), ("0xacce", "acmenpu"), ("0xacce", "vfio-pci"), ("0x10de", "nvidia")]
    ):
        function = tmp_path / "sys/bus/pci/devices" / ADDRESS.format(16 + index)
        function.mkdir(parents=True)
        (function / "vendor").write_text(f"{vendor}\n", encoding="ascii")
        (function / "class").write_text("0x030200\n", encoding="ascii")
        module = tmp_path / "sys/bus/pci/drivers" / driver
        module.mkdir(parents=True, exist_ok=True)
        (function / "driver").symlink_to(module)
    return tmp_path / "sys"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path / "kubelet.sock")
    server.pods["ml", "train-0"] = {"main": {"acme.example/npu": ["acme:0000"], "nvidia.com/gpu": ["7"]}}
    server.pods["ml", "numbered"] = {"main": {"acme.example/npu": ["npu1"]}}
    server.pods["ml", "foreign"] = {"main": {"nvidia.com/gpu": ["GPU-1"], "rdma/hca": ["0"]}}
    for pod in ("train-0", "numbered", "foreign"):
        begin_container(tmp_path / "pods", f"ml_{pod}_uid-{pod}")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def agent(tmp_path: Path, sysfs: Path, kubelet: Kubelet) -> Iterator[Agent]:
    settings, clock = Settings(), SystemClock()
    settings = settings._replace(
        sampling=settings.sampling._replace(interval=0.2), attribution=settings.attribution._replace(interval=0.3)
    )
    source = KubeletSource(clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path / "pods"), vendor=ACME)
    running = Agent(settings, AcmeBackend(), [source], clock, host=Host(sysfs))
    running.start()
    yield running
    assert running.stop()


def test_gpus_of_another_vendor_are_sampled_charged_attributed_and_shown(agent: Agent) -> None:
    def charged() -> bool:
        totals = {view.allocation.holder.pod: view.totals for view in agent.view().allocations}
        return len(totals) == 2 and min(each.observed_s for each in totals.values()) > 0.3

    wait_for(charged, "both holders to be charged")
    view = agent.view()
    holders = {each.allocation.unit.uuid: each for each in view.allocations}
    assert {uuid: each.allocation.holder.pod for uuid, each in holders.items()} == {
        "acme:0000": "train-0",
        "acme:0001": "numbered",
    }
    busy, idle = holders["acme:0000"].totals, holders["acme:0001"].totals
    assert math.isclose(busy.busy_s, 0.75 * busy.observed_s)
    assert busy.idle_run_s == 0.0 < idle.idle_s <= idle.observed_s
    assert (view.status.devices_visible, view.status.devices_expected) == (2, 2)
    assert view.status.unmanaged == (("vfio-pci", 1),)

    text = TextRenderer().render(list_series(view))
    assert 'gpu_info{gpu="0",uuid="acme:0000",name="Acme N1"' in text
    assert re.search(r'gpu_exporter_driver_errors_total{call="acme_read_heat",error="ACME_E_SENSOR"} \d+', text)
    assert re.search(r'gpu_power_watts{gpu="1",uuid="acme:0001"} 80\b', text)
    assert "nvml" not in re.sub("(?m)^#.*$", "", text)
    page = render_page(view, no_history)
    assert "Acme N1" in page
    assert "ml/train-0" in page


def test_slurm_jobs_are_resolved_by_another_vendors_device_files() -> None:
    lines = parse_gres_conf("Name=gpu File=/dev/npu/[1,0]", "gres.conf", lambda _: "")
    assert order_of(lines, "n0", (("", 2),), ACME).minors == ("1", "0")
    detected = parse_gres_conf("AutoDetect=acme\nName=gpu", "gres.conf", lambda _: "")
    assert order_of(detected, "n0", (("", 2),), ACME).kind == "index"
    assert order_of(parse_gres_conf("Name=gpu", "gres.conf", lambda _: ""), "n0", (), ACME).problem.endswith(
        "add File=/dev/npu/N"
    )
