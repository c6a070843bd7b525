"""The names of the collectors. Apart, because the command line needs them without loading the collectors."""

# By name, in the order in which they run: (on by default, description). registry.py finds each collector by its name.
# MIG is last, because it divides values that other collectors have read.
COLLECTORS = {
    "utilization": (True, "shares of time in which kernels ran, and in which memory was read or written"),
    "video": (True, "encoder and decoder utilization"),
    "gpm": (True, "graphics, SM, tensor and DRAM activity, on Hopper and newer"),
    "memory": (True, "memory used, free, reserved, total"),
    "power": (True, "power, its limit, energy"),
    "thermal": (True, "temperatures, their limits and margin"),
    "clocks": (True, "clocks, their maximum, performance state"),
    "throttle": (True, "time throttled, by reason"),
    "throttle-active": (False, "current reasons for throttling"),
    "pcie": (True, "PCIe traffic and replays"),
    "pcie-link": (True, "present and maximum bandwidth of the PCIe link"),
    "nvlink": (True, "NVLink traffic"),
    "nvlink-errors": (False, "errors of NVLink, by kind"),
    "fabric": (True, "NVLinks that are up, and the registration with the fabric of NVSwitches"),
    "ecc": (True, "ECC errors"),
    "remap": (True, "remapped rows and retired pages"),
    "recovery": (True, "action that the driver requests, e.g. a reset"),
    "xid": (True, "XID errors, by code"),
    "processes": (True, "number of processes, and use by each holder's processes"),
    "mig": (True, "MIG instances, with their own activity, memory and power"),
}
