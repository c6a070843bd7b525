"""Identifiers of a vendor's GPUs in Kubernetes, in Slurm and on the PCI bus.

A backend (the code that reads one kind of GPU) names its vendor, for the sources of holders and the inventory. The
reconciler has no backend: it treats pods with resources of any vendor in VENDORS as holders. Other code names NVIDIA
only in hints for people.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Vendor(NamedTuple):
    """One vendor. Patterns must match the whole text.

    `resource`: Kubernetes resources whose devices are GPUs or parts of GPUs. `replica`: the suffix of an id that
    identifies one of several replicas of a device; the other patterns match ids without it. `device_id`: ids of device
    plugins that are the driver's own ids. `numbered_id`: ids that contain the number of the device file; groups minor
    and instance. `unfaithful_id`: ids that begin with a driver's id (group id), which may not be the pod's device.
    `cdi_id`: names of the Container Device Interface; group name is the driver's name or a position.

    `claim_driver`: drivers of dynamic resource allocation that allocate GPUs. `claim_device`: the names that these
    drivers give to devices; group minor, and for a MIG instance also profile and placed, or plain. `claim_elsewhere`:
    the names of GPUs that are assigned to virtual machines. `monitors`: pods whose claims only monitor, as
    NAMESPACE/POD.

    `device_file`: path of the device file, with its number. `device_major`: the major number of the device file, which
    identifies a link of any name. `device_file_name`: the path as shown to people. `capability_file`: path of a file
    that opens a part of a GPU. `autodetect`: the AutoDetect values of Slurm's gres.conf that list GPUs in the driver's
    order. `autodetect_files`: the values that list GPUs in the order of the names of their device files. `pci_vendor`:
    the vendor id as in sysfs. `kernel_driver`: the kernel module that the driver uses.
    `visible_variable`: the environment variable that lists the GPUs of a container.
    """

    name: str
    resource: re.Pattern[str]
    replica: re.Pattern[str]
    device_id: re.Pattern[str]
    numbered_id: re.Pattern[str]
    unfaithful_id: re.Pattern[str]
    cdi_id: re.Pattern[str]
    claim_driver: re.Pattern[str]
    claim_device: re.Pattern[str]
    claim_elsewhere: re.Pattern[str]
    monitors: tuple[str, ...]
    device_file: re.Pattern[str]
    device_major: int
    device_file_name: str
    capability_file: re.Pattern[str]
    autodetect: frozenset[str]
    autodetect_files: frozenset[str]
    pci_vendor: str
    kernel_driver: str
    visible_variable: str

    def resources(self, further: Sequence[str] = ()) -> tuple[re.Pattern[str], ...]:
        """Patterns of this vendor's resources, followed by the site's `further` patterns. Raises ValueError."""
        return self.resource, *compile_resources(further)


def compile_resources(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Compiles the patterns of --attribution.resource. Raises ValueError."""
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as exc:
            raise ValueError(f"--attribution.resource: not a regular expression: {pattern!r}: {exc}") from exc
    return compiled


NVIDIA = Vendor(
    name="NVIDIA",
    # nvidia.com/gpu, gpu.shared, mig-1g.10gb. Not matched: network cards (hostdev, rdma_shared_device_a), and HAMi's
    # gpumem, which counts megabytes.
    resource=re.compile(r"nvidia\.com/(gpu(\..+)?|mig-.+)"),
    # NVIDIA's plugin writes "::N" for time slicing and MPS, GKE's /vgpuN.
    replica=re.compile(r"(::|/vgpu)[0-9]{1,9}$", re.ASCII),
    # GPU-<uuid>, MIG-<uuid>, MIG-GPU-<uuid>/gi/ci (drivers before R470)
    device_id=re.compile(r"(GPU|MIG)-[0-9A-Za-z-]+(/[0-9]{1,4}/[0-9]{1,4})?"),
    # GKE's: nvidia0, nvidia0/gi3 (a MIG instance)
    numbered_id=re.compile(r"nvidia(?P<minor>[0-9]{1,4})(?:/gi(?P<instance>[0-9]{1,4}))?"),
    # A UUID with a suffix: -N of HAMi and Volcano, -_-N of gpushare-device-plugin. Their schedulers choose the device
    # and write it on the pod. If another plugin writes such an id, it is not proven to mean this device either.
    unfaithful_id=re.compile(
        r"(?P<id>(?:MIG-)?(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})"
        r"(?!/[0-9]{1,4}/[0-9]{1,4}$).+",
        re.DOTALL,
    ),
    cdi_id=re.compile(r"nvidia\.com/(?:gpu|mig)=(?P<name>.+)"),
    # Not matched: compute-domain.nvidia.com, which allocates channels between GPUs, but no GPUs.
    claim_driver=re.compile(r"gpu\.nvidia\.com|k8s\.gpu\.nvidia\.com.*|nvidia\.com/gpu.*"),
    # kubernetes-sigs/dra-driver-nvidia-gpu: gpu-1, gpu-1-mig-2g47gb-14-0 (profile, profile id, first slice), and up to
    # 25.8 gpu-1-mig-14-0-2 (profile id, first slice, number of slices).
    claim_device=re.compile(
        r"gpu-(?P<minor>[0-9]{1,4})"
        r"(?:-mig-(?:(?P<profile>[0-9]{1,2}[cg][0-9a-z-]{1,56})-(?P<placed>[0-9]{1,4}-[0-9]{1,4})"
        r"|(?P<plain>[0-9]{1,4}-[0-9]{1,4}-[0-9]{1,4})))?"
    ),
    claim_elsewhere=re.compile(r"gpu-vfio-[0-9]+"),
    # NVIDIA's GPU operator, in its default namespace and in the one that OpenShift's catalog uses.
    monitors=("gpu-operator/nvidia-dcgm-exporter-.*", "nvidia-gpu-operator/nvidia-dcgm-exporter-.*"),
    device_file=re.compile(r".*nvidia(\d+)"),
    device_major=195,  # Documentation/admin-guide/devices.txt of Linux
    device_file_name="/dev/nvidiaN",
    capability_file=re.compile(r".*nvidia-cap(\d{1,6})"),
    autodetect=frozenset(("nvml",)),
    autodetect_files=frozenset(("nvidia",)),
    pci_vendor="0x10de",
    kernel_driver="nvidia",
    visible_variable="NVIDIA_VISIBLE_DEVICES",
)
VENDORS = (NVIDIA,)


def gpu_resources(further: Sequence[str] = ()) -> tuple[re.Pattern[str], ...]:
    """Patterns of the resources of all vendors, followed by the site's `further` patterns. Raises ValueError."""
    return (*(vendor.resource for vendor in VENDORS), *compile_resources(further))
