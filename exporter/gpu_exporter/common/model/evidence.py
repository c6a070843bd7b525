"""Activity of a holder on its host: the evidence for the causes of low utilization.

A look is one reading of a holder's processes and cgroup. Rates are means over the time since the previous look.
"""

from __future__ import annotations

from typing import NamedTuple


class ProcessEvidence(NamedTuple):
    """The processes of a holder in one look. Nothing here identifies a process: no pid, no command line, no path.

    - `processes`: the number of processes that were read; `is_all` is false if there were more.
    - `ranks`: processes with a context on the holder's GPUs. `rank_cores`: CPUs used by the busiest rank.
    - `loaders`: processes with PyTorch's name for loaders (`named_loaders`); without such names, all other processes
      that used CPU time.
    - `busy_loaders`, `full_loaders`: loaders that used at least 0.3 and 0.85 of a CPU.
    - `loader_cores`, `loader_most`: CPUs used by all loaders, and by the busiest loader.
    - `loader_cpus`: the number of CPUs on which all loaders together may run. `cpus`: this number for all processes
      that were read.
    - `loader_bytes`: resident memory of the largest loader, shared pages included.
    - `runnable`: threads that ran or waited for a CPU at the moment of the look: all threads of the two busiest
      processes, and one thread of each other process. `is_all_threads` is false if these two had more threads than were
      read.
    - `blocked`: processes that waited for a disk or a network file system. `stopped`: ranks that a signal stopped.
    - `far`: by GPU UUID, the CPUs of its ranks, if the ranks may run only on CPUs that are not near the GPU.
    - `terminal`, `notebook`: a process has a terminal, or the name of a notebook server.
    - `switches`: how often per second the main threads of the two busiest processes lost their CPU to other threads.
    """

    processes: int
    is_all: bool
    ranks: int | None = None
    rank_cores: float | None = None
    loaders: int | None = None
    named_loaders: int = 0
    busy_loaders: int = 0
    full_loaders: int = 0
    loader_cores: float = 0.0
    loader_most: float = 0.0
    loader_bytes: float | None = None
    loader_cpus: int | None = None
    cpus: int | None = None
    runnable: int = 0
    is_all_threads: bool = True
    blocked: int = 0
    stopped: int = 0
    far: tuple[tuple[str, str], ...] = ()
    terminal: bool = False
    notebook: bool = False
    switches: float | None = None


class FileEvidence(NamedTuple):
    """The file access of at most four processes in one look, processes on a GPU first. Reading it needs the right to
    trace.

    `reads`: read calls per second, on files, pipes and other descriptors. `read_bytes`: bytes per second that these
    calls returned, from the page cache and network files too. `remote_files`: open files on network file systems.
    `local_files`: open files on other file systems except FUSE, tmpfs, overlay and the kernel's own.
    """

    reads: float
    read_bytes: float
    remote_files: int
    local_files: int


class HostEvidence(NamedTuple):
    """One look at a holder over (start, end] of the monotonic clock; None is unknown. Rates are per second.

    - `cpus`: the number of CPUs that the cgroups with most of the work may use at a time, None without a limit.
      `quota`: the number that the CFS quota alone allows. `throttled`: share of the periods in which this quota ran
    out.
    - `cores`: CPUs that the holder used. `host_cpus`: CPUs of the host. `host_busy`: share of the host's CPUs in use.
    - `pressure_...`: share of the time in which some task waited for this resource; `memory_full`: in which all tasks
      waited for memory (PSI; only with version 2 of cgroups).
    - `memory_bytes`, `memory_limit`: use and limit of the cgroup nearest to its limit. `memory_cache`: its page cache.
      `refaults`: pages of files that were evicted and read again.
    - `killed`: processes that the OOM killer ended, for any limit. `ooms`: the number of these kills that the holder's
      own limit can explain.
    - `shm_bytes`, `shm_limit`: shared memory in use, and the size of /dev/shm.
    - `read`, `written`: bytes from and to block devices. `received`, `sent`: bytes of the holder's own network
      namespace.
    - `network_files`: types of the network file systems that the holder has mounted.
    """

    start: float
    end: float
    cpus: float | None = None
    quota: float | None = None
    cores: float | None = None
    throttled: float | None = None
    host_cpus: float | None = None
    host_busy: float | None = None
    pressure_cpu: float | None = None
    pressure_memory: float | None = None
    pressure_io: float | None = None
    memory_full: float | None = None
    memory_bytes: float | None = None
    memory_limit: float | None = None
    refaults: float | None = None
    killed: float | None = None
    ooms: float | None = None
    memory_cache: float | None = None
    shm_bytes: float | None = None
    shm_limit: float | None = None
    read: float | None = None
    written: float | None = None
    received: float | None = None
    sent: float | None = None
    network_files: tuple[str, ...] | None = None
    processes: ProcessEvidence | None = None
    files: FileEvidence | None = None
