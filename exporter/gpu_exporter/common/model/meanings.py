"""The meaning of each state and cause, with the change that the owner or the site can make. Every output uses these
texts.

`{name}` in a text is a number of the cause: a `quantity` of gpu_allocation_cause_value, in base units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.common.durations import describe_duration

QUANTITY = re.compile(r"\{(\w+)\}")
GIB = 2**30


class Meaning(NamedTuple):
    """One state or cause, in clauses without a period.

    - `title`: a few words. `says`: a text with numbers; if a number is unknown, outputs print `title`.
    - `owner`, `site`: the change that the owner or the site can make, "" for none. `number`: the owner's change with a
      number.
    - `is_training`: the owner's change is for a training, not for a server.
    """

    title: str
    says: str = ""
    owner: str = ""
    number: str = ""
    site: str = ""
    is_training: bool = False

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the numbers in these texts."""
        return tuple(dict.fromkeys(QUANTITY.findall(self.says + self.number)))


STATES: Mapping[str, Meaning] = {
    "healthy": Meaning("in use", "the GPU is in use"),
    "busy_inefficient": Meaning(
        "busy, with few SMs at work",
        "the GPU is busy, but most of its SMs have no work",
        "raise batch_size, or use a smaller GPU or a MIG instance",
    ),
    "low": Meaning(
        "little used",
        "the GPU is used for less than half of the time",
        "fewer or smaller GPUs, or a MIG instance, may be enough",
    ),
    "bursty": Meaning(
        "works in bursts",
        "the GPU works in bursts, with pauses between them",
        "shorten the pauses: load data and write checkpoints while the GPU works",
    ),
    "throttled": Meaning(
        "slowed by heat or power",
        "the GPU runs below its normal clock because of heat, power supply or hardware",
        "write a checkpoint, and start again on another GPU",
        site="check fans, air and power supply of the node (nvidia-smi -q -d PERFORMANCE)",
    ),
    "held_idle": Meaning(
        "held and idle",
        "the GPU is held, but nothing has run on it for minutes",
        "release the GPU, or start its work",
    ),
    "held_no_process": Meaning(
        "held without a process",
        "the GPU is held, but no process has opened it",
        "release the GPU, or check that the program finds it",
    ),
    "stalled": Meaning(
        "busy without progress",
        "the GPU is 100 % busy at low power, without a sign of progress: it waits or hangs",
        "read the log and the stacks (py-spy dump) of its ranks first, then restart",
        site="check the XIDs, the NVLinks and the network of its nodes",
    ),
    "unknown": Meaning("not known", "the data are not enough to decide whether the GPU is used"),
    "free": Meaning("held by nobody", "the GPU is free"),
    "closed": Meaning("held by nobody", "the scheduler has closed this node (down, drained or reserved)"),
    "mig": Meaning("divided into MIG instances", "the GPU is divided into MIG instances, each with its own line"),
    "away": Meaning("not on the bus", "the GPU is not on the PCIe bus now"),
    "lost": Meaning("lost", "the driver has lost the GPU", site="drain the node, and reset or replace the GPU"),
    "missing": Meaning(
        "missing", "the node should have this GPU, but the driver does not list it", site="check the slot"
    ),
    "hung": Meaning("does not answer", "the driver does not answer for the GPU", site="drain and restart the node"),
    "stale": Meaning(
        "answers late", "the last answer from the GPU is old", site="check the load and the driver of the node"
    ),
}
CAUSES: Mapping[str, Meaning] = {
    "link_degraded": Meaning(
        "a slow PCIe link",
        "the PCIe link runs at {link_ratio} of its maximum bandwidth while the GPU works",
        "write a checkpoint, and start again on another GPU",
        site="look for PCIe errors (AER) in the kernel log, drain the node, and run diagnostics",
    ),
    "lost_rank": Meaning(
        "a member of the job cannot continue, and the others wait for it",
        "a rank cannot continue; {waiting_gpus} of the job's {gpus} GPUs on the node have waited for {run_seconds}",
        "continue stopped processes (kill -CONT); if none is stopped, save log and stacks, and restart",
        site="check the XIDs and the kernel log of the node",
    ),
    "unused_gpu": Meaning(
        "fewer GPUs used than held",
        "only {used_gpus} of its {gpus} GPUs on this node are used",
        "start one process for each GPU (torchrun --nproc_per_node), or ask for fewer GPUs",
    ),
    "starting": Meaning(
        "installs, loads or compiles",
        "held for {held_seconds}; the GPU has not worked yet, but the holder uses {used_cpus} CPUs",
        "put packages into the image, and copy data to the node in a job without a GPU",
    ),
    "interactive": Meaning(
        "a person at a terminal or notebook",
        "a terminal or notebook is open, and the holder uses {used_cpus} CPUs",
        "end unused sessions; for development, a MIG instance or a shared GPU is enough",
    ),
    "no_process": Meaning(
        "nothing runs on the GPU",
        "the holder has no process on the GPU, and uses {used_cpus} CPUs",
        "end the job if its work is done, or ask for a GPU only in the step that uses it",
    ),
    "steps_elsewhere": Meaning(
        "the loop makes steps, but not on this GPU",
        "the loop reports {steps} steps, but this GPU has been idle for {idle_seconds}",
        "check that model and batches are on the GPU, and that torch.cuda.is_available() is true",
    ),
    "late_rank": Meaning(
        "the other ranks perhaps wait for this one",
        "no progress for {run_seconds} on {waiting_gpus} of its {gpus} GPUs on the node",
        "look at the rank whose GPU is at 0 % first: its last log line, its stack (py-spy dump), its XIDs",
    ),
    "checkpointing": Meaning(
        "waits for its checkpoints",
        "in {bursts} bursts of writing, utilization fell from {before_ratio} to {within_ratio}",
        "write checkpoints asynchronously (torch.distributed.checkpoint.async_save)",
        is_training=True,
    ),
    "node_memory": Meaning(
        "the node, or a cgroup above the holder, lacks memory",
        "the node lacks memory; the holder uses {memory_ratio} of its own limit",
        "start on another node",
        site="find the processes that fill the node's memory, and give each holder a limit",
    ),
    "cpu_contended": Meaning(
        "others use the CPUs of the host",
        "it gets {used_cpus} of its {cpus} CPUs; others use {other_cpus} CPUs, and no CPU is free",
        "request the CPUs, or start on another node",
        site="reserve CPUs for holders of GPUs (requests.cpu as large as limits.cpu; ConstrainCores=yes)",
    ),
    "memory_pressure": Meaning(
        "too little host memory",
        "its tasks waited for memory in {waiting_ratio} of the time; it uses {memory_ratio} of its limit",
        "ask for more memory, or use fewer workers and a smaller prefetch_factor",
    ),
    "shm_full": Meaning(
        "the shared memory is full",
        "{used_bytes} of shared memory are in use, and /dev/shm can hold {size_bytes}",
        "mount a larger /dev/shm (emptyDir in memory; docker --shm-size), or use fewer workers",
    ),
    "cpu_oversubscribed": Meaning(
        "too many threads on few CPUs",
        "{runnable_threads} threads are runnable on {cpus} CPUs",
        "set OMP_NUM_THREADS to the CPUs of each process, or use fewer workers",
        "set OMP_NUM_THREADS={threads_to_set}",
    ),
    "cpu_quota": Meaning(
        "the CPU quota runs out",
        "its quota of {cpus} CPUs ran out in {throttled_ratio} of the periods",
        "ask for more CPUs (Kubernetes: limits.cpu; Slurm: --cpus-per-task)",
    ),
    "remote_io": Meaning(
        "waits for a network file system",
        "it waits for files on a network file system, and reads {read_bytes_per_second}",
        "copy the data to a local disk when the job starts, or pack them into few large files",
    ),
    "small_file_io": Meaning(
        "many small reads",
        "{reads_per_second} reads a second of {read_bytes} on average",
        "pack the samples into large files (WebDataset, Parquet), and read them in order",
        is_training=True,
    ),
    "cpu_bound_input": Meaning(
        "the loaders use all CPUs",
        "processes other than those on the GPU use {used_cpus} of {cpus} CPUs, and no CPU is free",
        "make samples cheaper (decode in advance or on the GPU), or ask for more CPUs",
        is_training=True,
    ),
    "pinned_loaders": Meaning(
        "loaders bound to few CPUs",
        "processes other than those on the GPU may run only on {bound_cpus} of {cpus} CPUs",
        "remove the binding (by taskset, numactl, GOMP_CPU_AFFINITY or a library), or ask Slurm for more CPUs",
        is_training=True,
    ),
    "too_few_workers": Meaning(
        "too few loaders",
        "few processes load its data, and {free_cpus} CPUs are free",
        "raise num_workers of the DataLoader, as far as CPUs and memory allow",
        "set num_workers of the DataLoader to {workers_to_try}",
        is_training=True,
    ),
    "input_wait": Meaning("the loop waits for data", "the loop waits for data in {wait_ratio} of each step"),
    "far_numa": Meaning(
        "bound to CPUs far from the GPU",
        "its processes may run only on CPUs that are not near this GPU",
        "bind the job to CPUs near its GPUs (Slurm: --gres-flags=enforce-binding)",
        site="static CPU manager and Topology Manager (Kubernetes); Cores= in gres.conf (Slurm)",
    ),
    "data_parallel": Meaning(
        "uses DataParallel",
        "its model uses DataParallel on {gpus} GPUs of one node",
        "use DistributedDataParallel with one process for each GPU",
        "use DistributedDataParallel: torchrun --nproc_per_node={gpus}",
    ),
    "checkpoint_share": Meaning(
        "the loop reports waits for its checkpoints",
        "its loop spends {phase_ratio} of its time on checkpoints",
        "write checkpoints asynchronously or less often",
    ),
    "cpu_logging": Meaning(
        "metrics or logs in each step",
        "its loop spends {phase_ratio} of its time on logging",
        "log less often, and read values from the GPU only when you log them",
    ),
    "launch_bound": Meaning(
        "many small kernels",
        "data take only {wait_ratio} of a step of {step_seconds}, but the GPU is used for {busy_ratio} of the time",
        "compile the model (torch.compile), raise batch_size, read the loss less often",
    ),
    "small_batch": Meaning(
        "a small batch",
        "with batch_size {batch_size}, {memory_ratio} of the GPU's memory is in use",
        "raise batch_size as far as memory and loss allow, and adapt the learning rate",
        is_training=True,
    ),
    "no_mixed_precision": Meaning(
        "32 bits without tensor cores",
        "its parameters and matrix products are float32",
        "use torch.autocast with bfloat16, or torch.set_float32_matmul_precision('high')",
    ),
    "cpu_work": Meaning(
        "computes on CPUs beside an idle GPU",
        "its processes use {used_cpus} CPUs, while this GPU does nothing",
        "check that model and data are on this GPU; run work that needs no GPU in a job without a GPU",
    ),
}


def format_quantity(quantity: str, value: float) -> str:
    """Formats a number of a cause for people: 0.4 of a `_ratio` is `40%`, 7500 of `_seconds` is `2h5m`."""
    if quantity.endswith("_ratio"):
        return f"{value:.0%}"
    if quantity.endswith("_seconds"):
        return describe_duration(value) if value >= 1.0 else f"{value * 1e3:.3g} ms"
    if quantity.endswith("_bytes_per_second"):
        return f"{value / 1e6:.3g} MB/s"
    if quantity.endswith("_bytes"):
        return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / 2**20:.3g} MiB"
    return f"{value:.3g}" if value < 1000.0 else f"{value:.0f}"


def fill(text: str, values: Mapping[str, float]) -> str:
    """Fills the numbers into a text; "" if one of them is unknown."""
    names = QUANTITY.findall(text)
    if not values.keys() >= set(names):
        return ""
    return text.format(**{name: format_quantity(name, values[name]) for name in names})


def describe_cause(name: str, values: Mapping[str, float]) -> str:
    """Describes a cause, with its numbers if all are known. Returns its name if this version has no text."""
    meaning = CAUSES.get(name)
    return name if meaning is None else fill(meaning.says, values) or meaning.title


def advise(name: str, values: Mapping[str, float]) -> str:
    """Returns the changes that the owner of the holder and the site can make, as one text; "" if there are none."""
    meaning = CAUSES.get(name)
    if meaning is None:
        return ""
    owner = fill(meaning.number, values) or meaning.owner
    return "; ".join(filter(None, (owner, meaning.site and f"for the site: {meaning.site}")))


def sentence(text: str) -> str:
    """Makes a whole sentence of one of these texts."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""
