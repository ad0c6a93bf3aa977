"""Settings of a process that trains."""

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path

# Rounds of busy waiting, under a millisecond; the default of GNU OpenMP is 300,000, or billions in some of its versions
SPIN_COUNT = 10_000
# Parameters of mallopt(3), from malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def limit_spinning() -> None:
    """
    Make idle OpenMP threads give their core back soon, unless ``GOMP_SPINCOUNT`` or ``OMP_WAIT_POLICY`` is set. It must be
    called before PyTorch is imported. By default they wait busily, and take the cores that the games and other runs need.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def keep_freed_memory() -> None:
    """
    Make glibc keep freed memory for the next allocation, in this process. By default it gives large blocks back to the system,
    and every page of the next block causes a page fault. Each update allocates and frees the same tens of megabytes.
    """
    # Without glibc there is no such function
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        # Older versions take 32 MiB at most
        mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def idle_cores(seconds: float = 1.0) -> int:
    """
    :param seconds: How long the machine is watched
    :return: how many cores of this process nothing uses, at least 1; 1 where the system does not say (only Linux does)
    """
    try:
        cores = os.sched_getaffinity(0)
        before, start = _busy_seconds(cores), time.perf_counter()
        time.sleep(seconds)
        busy = (_busy_seconds(cores) - before) / (time.perf_counter() - start)
        return max(1, len(cores) - round(busy))
    except (OSError, AttributeError):
        return 1


def _busy_seconds(cores: set[int]) -> float:
    """
    :param cores: Numbers of cores
    :return: seconds since the start of the machine in which they were not idle, added up
    """
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    # user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5))
    ticks = [[int(x) for x in times[:8]] for name, *times in lines if name in names]
    return sum(sum(core) - sum(core[3:5]) for core in ticks) / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """:return: name of the processor. On another one the same seed may give another run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
