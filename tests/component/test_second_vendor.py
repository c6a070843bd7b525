"""GPUs of another vendor: a backend of forty lines and a Vendor work with everything, from the driver to a pod's label.

Only the backend and vendor.py know NVIDIA's ids, resources, device files, PCI vendor, and names of calls and errors. The
other vendor's driver has partitions and links, and no levels: no limit of the power, no states, no maximum of clocks.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from grafana.queries import Node
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.agent.attribution.slurm.gres.conf import order_of, parse_gres_conf
from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import Device, EventWatch, Memory, Rates
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.text import TextRenderer
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.agent.runtime.surroundings import Host
from gpu_exporter.common import vendor
from gpu_exporter.common.clock import Clock, ManualClock, SystemClock
from gpu_exporter.common.config.defaults import Policy, Settings
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import Vendor, gpu_resources
from gpu_exporter.reconciler.decision.policy import LABEL, decide
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.marks import Refused, timestamp
from tests.rules.expected import END, FIRES, idle
from tests.rules.promtool import Case, build, run
from tests.rules.test_rules import alerts_at
from tests.rules.world import World
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import wait_for
from tests.testbed.simulated_node import SimulatedNode

ACME = Vendor(
    name="Acme",
    resource=re.compile(r"acme\.example/(npu|part-.+)"),
    replica=re.compile(r"/slice\d+$"),
    device_id=re.compile(r"acme:[0-9a-f]{4}(\.[0-9])?"),
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
    autodetect_files=frozenset(),
    pci_vendor="0xacce",
    kernel_driver="acmenpu",
    visible_variable="ACME_VISIBLE_DEVICES",
)
ADDRESS = "0000:{:02x}:00.0"


class AcmeDriver:
    """Two boards, of which the second is divided into two halves. It counts what the links of a board have moved."""

    boards = ((0,), (0, 1))

    def utilization(self, board: int, part: int) -> float:
        return 0.0 if board else 0.75

    def link_bytes(self, board: int) -> float:
        return 3e9


class AcmeDevice(Device):
    """A board, or a part of one: the driver lists each part as a device. A call always fails.

    `gpu_mig_*`, `gpu_nvlink_*` and `gpu_xid_*` are names of NVIDIA's, so parts are no instances of a board, and the bytes
    of the links are not published.
    """

    def __init__(self, driver: AcmeDriver, position: int, board: int, part: int) -> None:
        self._driver, self._place = driver, (board, part)
        name, uuid = "Acme N1", f"acme:{board:04x}"
        if len(driver.boards[board]) > 1:
            name, uuid = f"{name} half", f"{uuid}.{part}"
        self.identity = DeviceIdentity(position, uuid, name, "1.0", ADDRESS.format(16 + board), position)
        self.answers = 0

    def read_utilization(self) -> Rates:
        self.answers += 1
        return Rates(self._driver.utilization(*self._place), None)

    def read_memory(self) -> Memory:
        return Memory(total=64 * 2**30, used=2**30, free=63 * 2**30, reserved=None)

    def read_power(self) -> float:
        return 80.0

    def read_power_limit(self) -> float:
        return 300.0  # without a limit, power is no witness, and one witness proves no idleness

    def read_temperature(self) -> float:
        raise DeviceError("acme_read_heat", "ACME_E_SENSOR")


class AcmeBackend:
    name = "acme"
    vendor = ACME
    is_live = True

    def __init__(self) -> None:
        driver = AcmeDriver()
        places = [(board, part) for board, parts in enumerate(driver.boards) for part in parts]
        self._devices = [AcmeDevice(driver, position, *place) for position, place in enumerate(places)]

    def open(self) -> None: ...

    def count(self) -> int:
        return len(self._devices)

    def find(self, position: int) -> Device:
        return self._devices[position]

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        raise NotSupported("acme_events", "ACME_E_NONE")

    def close(self) -> None: ...


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Three boards of Acme, the last of which belongs to a virtual machine, and one board of NVIDIA."""
    for index, (maker, driver) in enumerate(
        [("0xacce", "acmenpu"), ("0xacce", "acmenpu"), ("0xacce", "vfio-pci"), ("0x10de", "nvidia")]
    ):
        function = tmp_path / "sys/bus/pci/devices" / ADDRESS.format(16 + index)
        function.mkdir(parents=True)
        (function / "vendor").write_text(f"{maker}\n", encoding="ascii")
        (function / "class").write_text("0x030200\n", encoding="ascii")
        module = tmp_path / "sys/bus/pci/drivers" / driver
        module.mkdir(parents=True, exist_ok=True)
        (function / "driver").symlink_to(module)
    return tmp_path / "sys"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path / "kubelet.sock")
    server.pods["ml", "train-0"] = {"main": {"acme.example/npu": ["acme:0000"], "nvidia.com/gpu": ["7"]}}
    server.pods["ml", "half"] = {"main": {"acme.example/part-half": ["npu1"]}}
    server.pods["ml", "foreign"] = {"main": {"nvidia.com/gpu": ["GPU-1"], "rdma/hca": ["0"]}}
    for pod in ("train-0", "half", "foreign"):
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
    running.stop()


def test_gpus_of_another_vendor_are_sampled_charged_attributed_and_shown(agent: Agent) -> None:
    def charged() -> bool:
        totals = {view.allocation.holder.pod: view.totals for view in agent.view().allocations}
        return len(totals) == 2 and min(each.observed_s for each in totals.values()) > 0.3

    wait_for(charged, "both holders to be charged")
    view = agent.view()
    holders = {each.allocation.unit.uuid: each for each in view.allocations}
    assert {uuid: each.allocation.holder.pod for uuid, each in holders.items()} == {
        "acme:0000": "train-0",
        "acme:0001.0": "half",
    }
    busy, idle = holders["acme:0000"].totals, holders["acme:0001.0"].totals
    assert math.isclose(busy.busy_s, 0.75 * busy.observed_s)
    assert busy.idle_run_s == 0.0 < idle.idle_s <= idle.observed_s
    assert (view.status.devices_visible, view.status.devices_expected) == (3, 3)
    assert view.status.unmanaged == (("vfio-pci", 1),)

    text = TextRenderer().render(list_series(view))
    assert 'gpu_info{gpu="0",uuid="acme:0000",name="Acme N1"' in text
    assert re.search(r'gpu_exporter_driver_errors_total{call="acme_read_heat",error="ACME_E_SENSOR"} \d+', text)
    assert re.search(r'gpu_power_watts{gpu="1",uuid="acme:0001.0"} 80\b', text)
    assert "nvml" not in re.sub("(?m)^#.*$", "", text)
    assert not re.search("(?m)^gpu_(mig|nvlink|xid)_", text), "names of NVIDIA's partitions, links and events"
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


MINUTES = END + 1
TARGET = {"job": "gpu-exporter", "node": "n1", "instance": "n1"}


class Day(NamedTuple):
    """What a Prometheus has scraped every minute, and the last answer."""

    world: World
    node: SimulatedNode
    text: str


@pytest.fixture
def day(kubelet: Kubelet, tmp_path: Path) -> Day:
    """More than two hours of the node."""

    def make_source(clock: Clock) -> KubeletSource:
        return KubeletSource(clock, KubeletOptions(socket=kubelet.socket, logs=tmp_path / "pods"), vendor=ACME)

    scenario = parse_scenario({"gpus": [{"model": "H100"}]})  # which the backend replaces
    node = SimulatedNode(scenario, backend=AcmeBackend(), make_source=make_source)
    world, text = World(MINUTES), ""
    begin = node.clock.wall()
    for minute in range(1, MINUTES + 1):
        text = TextRenderer().render(list_series(node.run(60)))
        world.set("up", TARGET, minute, 1.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                value = sample.value - begin if sample.name.endswith("_timestamp_seconds") else sample.value
                world.set(sample.name, {**TARGET, **sample.labels}, minute, value)
    return Day(world, node, text)


@pytest.mark.slow
def test_an_idle_part_of_a_board_gets_hours_an_alert_a_line_on_the_dashboard_and_a_label(
    day: Day, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hours: an idle part and a busy board, each a device of its own.
    held_s = 60.0 * MINUTES
    for part, seconds in {"held": 2 * held_s, "idle": held_s, "busy": 0.75 * held_s}.items():
        found = re.findall(rf"gpu_tenant_{part}_gpu_seconds_total{{.*}} (.*)", day.text)
        assert [float(each) for each in found] == [pytest.approx(seconds, rel=0.02)], part

    # Alert and dashboard: by promtool, with the rules and the queries of the panels.
    shown = re.sub(r"\$(job|cluster|node)\b", ".*", Node().holders())
    rows = [
        ('{gpu="0", holder="ml/train-0", node="n1"}', 1.0),
        ('{gpu="1", holder="ml/half", node="n1"}', 1.0),
    ]
    case = Case("Acme", day.world, idle((FIRES, MINUTES), pod="half", gpus="1"), values=[(END, shown, rows)])
    holds, said = run([case], tmp_path, build(tmp_path / "rules", {}))
    assert holds, said
    text = alerts_at(END, "GpuHolderIdle", day.world, tmp_path)
    assert "Pod ml/half holds a GPU and has not used it" in text and "GPU 1 of n1." in text

    # Label: by the reconciler, once the vendor is in the table.
    clock = ManualClock(wall=day.node.clock.wall())
    source = ExporterSource([parse_exporter("n1:9836")], Policy().underused_after, clock, lambda _url: day.text)
    decisions = {each.name.name: each for each in decide(source.read_evidence(), Policy())}
    assert {name: each.stage for name, each in decisions.items()} == {"half": "underused", "train-0": "active"}
    pods = OnePod("half", "uid-half", {"acme.example/part-half": "1"}, clock.wall() - held_s)
    with pytest.raises(Refused):
        PodMarker(pods, Policy(), clock, resources=gpu_resources()).write(decisions["half"], clock.wall())
    monkeypatch.setattr(vendor, "VENDORS", (vendor.NVIDIA, ACME))
    PodMarker(pods, Policy(), clock, resources=gpu_resources()).write(decisions["half"], clock.wall())
    assert pods.pod["metadata"]["labels"] == {LABEL: "underused"}


class OnePod(Api):
    """An API server with one pod, which runs since a time."""

    def __init__(self, name: str, uid: str, limits: dict[str, str], began_wall: float) -> None:
        super().__init__(client.ApiClient(client.Configuration()))
        running = {"running": {"startedAt": timestamp(began_wall)}}
        self.pod: dict[str, Any] = {
            "metadata": {"name": name, "namespace": "ml", "uid": uid, "resourceVersion": "1", "labels": {}},
            "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "main", "state": running}]},
        }

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        if function == self.core.patch_namespaced_pod:
            self.pod["metadata"]["labels"].update(arguments[2]["metadata"]["labels"])
        return copy.deepcopy(self.pod)

    send = call  # type: ignore[assignment]
