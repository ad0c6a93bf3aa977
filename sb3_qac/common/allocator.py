import ctypes

# Parameters of mallopt(3), from malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """
    Make the C library keep freed memory for the next allocation, in this process.

    By default glibc gives large blocks back to the system, and every page of the next block causes a page fault. Each update
    allocates and frees the same tens of megabytes, among them a gradient of 6 MB and images as floats.

    :return: Whether it worked; it needs glibc
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    # Older versions take 32 MiB at most
    mapped = mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)
    trimmed = mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(mapped and trimmed)
