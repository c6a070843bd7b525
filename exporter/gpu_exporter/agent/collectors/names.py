"""The names of the collectors. A separate module, because the command line needs them without loading
the collectors.
"""

# By name, in the order in which they run: (on by default, description). registry.py finds each collector by its name.
# MIG is last, because it divides values that other collectors have read.
COLLECTORS = {
    "utilization": (True, "share of time in which kernels ran, and memory was read or written"),
    "video": (True, "encoder and decoder utilization"),
    "gpm": (True, "graphics, SM, tensor and DRAM activity, from Hopper on"),
    "memory": (True, "memory used, free, reserved, total"),
    "power": (True, "power, its limit, energy"),
    "thermal": (True, "temperatures, their limits and margin"),
    "clocks": (True, "clocks, their maximum, performance state"),
    "throttle": (True, "time throttled, by reason"),
    "throttle-active": (False, "reasons that throttle at this moment"),
    "pcie": (True, "PCIe traffic and replays"),
    "pcie-link": (True, "bandwidth of the PCIe link now, and at most"),
    "nvlink": (True, "NVLink traffic"),
    "ecc": (True, "ECC errors"),
    "remap": (True, "remapped rows and retired pages"),
    "recovery": (True, "whether the driver asks for a reset"),
    "xid": (True, "XID errors, by code"),
    "processes": (True, "numbers of processes, and what each holder's processes use"),
    "mig": (True, "MIG instances, with their own activity, memory and power"),
}
