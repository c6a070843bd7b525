"""Turns the ids of device plugins and the names of resource claims into grants. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.agent.attribution.kubelet.podresources import ContainerDevices
from gpu_exporter.common.model.holders import Grant, Holder
from gpu_exporter.common.outside import whole
from gpu_exporter.common.vendor import Vendor

UNFAITHFUL = (
    "its scheduler writes the chosen device into the pod's annotations, and the kubelet may report another device"
)


class DeviceIds:
    """The names of one vendor's devices in Kubernetes."""

    def __init__(self, vendor: Vendor, resources: Sequence[str] = ()) -> None:
        """`resources`: regular expressions for names of further resources that are GPUs. Raises ValueError."""
        self._vendor = vendor
        self._resources = vendor.resources(resources)

    def device_of(self, device_id: str) -> str:
        """Removes the suffix for a replica or a part of a device from a device plugin's id."""
        device = self._vendor.replica.sub("", device_id)
        match = self._vendor.unfaithful_id.fullmatch(device)
        return match["id"] if match is not None else device

    def select(self, entry: ContainerDevices) -> ContainerDevices | None:
        """Returns the entry, reduced to its GPUs. None if it has no GPU or comes from a resource claim.

        An id in the driver's form (a UUID) is a GPU under any resource name. Numbers and other ids count as GPUs only
        for a GPU resource, because network cards and other devices have numbers too.
        """
        if entry.claimed:
            return None
        if any(resource.fullmatch(entry.resource) for resource in self._resources):
            return entry
        is_ours = self._vendor.device_id.fullmatch
        ids = tuple(device_id for device_id in entry.device_ids if is_ours(self.device_of(device_id)))
        return entry._replace(device_ids=ids) if ids else None

    def has_gpus(self, entry: ContainerDevices) -> bool:
        """Returns whether the entry may contain a GPU, from a device plugin or from a resource claim (DRA)."""
        return self.is_claimed_gpu(entry) if entry.claimed else self.select(entry) is not None

    def is_claimed_gpu(self, entry: ContainerDevices) -> bool:
        """Returns whether the claim is for GPUs: by its driver's name, or else by its CDI device names."""
        if self._vendor.claim_elsewhere.fullmatch("".join(entry.device_ids[:1])):
            return False  # a GPU of a virtual machine
        names = [entry.resource] if entry.resource else [name.partition("=")[0] for name in entry.device_ids]
        return any(self._vendor.claim_driver.fullmatch(name) for name in names)

    def grant_claimed(self, entry: ContainerDevices, holder: Holder) -> Grant | None:
        """Returns the grant for a device from dynamic resource allocation, None if its name cannot be parsed."""
        device_id = "".join(entry.device_ids[:1])
        match = self._vendor.claim_device.fullmatch(device_id)
        if match is None:
            return None
        number, share = f"{device_id} of claim {entry.claim}", "time_slice" if entry.is_share else ""
        claim = "" if entry.proven else entry.claim
        minor, profile, placed, plain = match.group("minor", "profile", "placed", "plain")
        if placed or plain:  # PROFILEID-START after the profile's name, PROFILEID-START-SIZE without the name
            profile_id, start = (placed or plain).split("-")[:2]
            device = f"{minor}/{profile or ''}/{profile_id}/{start}"
            return Grant("placement", device, holder, number=number, share=share, claim=claim)
        return Grant("minor", minor, holder, number=number, share=share, claim=claim)

    def grant(self, device_id: str, holder: Holder) -> Grant | None:
        """Returns the grant for a device id, None if the id cannot be parsed."""
        vendor = self._vendor
        share = "time_slice" if vendor.replica.search(device_id) else ""
        device = vendor.replica.sub("", device_id)
        if vendor.unfaithful_id.fullmatch(device):
            return Grant("unproven", self.device_of(device_id), holder, number=device_id, reason=UNFAITHFUL)
        if vendor.device_id.fullmatch(device):
            return Grant("uuid", device, holder, share=share)
        if match := vendor.numbered_id.fullmatch(device):
            if match["instance"]:
                return Grant("instance", f"{match['minor']}/{match['instance']}", holder, number=device, share=share)
            return Grant("minor", match["minor"], holder, number=device, share=share)
        if match := vendor.cdi_id.fullmatch(device):
            if vendor.device_id.fullmatch(match["name"]):
                return Grant("uuid", match["name"], holder, number=device, share=share)
            device = match["name"]
        if len(device) <= 4 and whole(device) is not None:  # --device-id-strategy=index
            return Grant("index", device, holder, number=device, share=share)
        return None
