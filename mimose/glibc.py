"""Making glibc's heap give freed memory back, so that the resident set can be read.

Note: [The allocator's thresholds]
glibc keeps what is freed, and readings of the resident set then mean nothing. Two
`mallopt` thresholds of 64 KiB make it give every larger block back. They hold for
the whole process and stay after the session; steps take longer for it (page
faults), so in a comparison every strategy has to run with them.

Note: [Holes from before]
Where a process has trained before the thresholds were set, its heap is full of
large holes. malloc serves from them first, whatever the thresholds, and what is
freed into them stays resident: what a step of 80 MiB grows by was read as anything
from 0 to 90. So every hole of 64 KiB and more is taken and never given back; trimmed
first, they hold addresses but no memory. What `torch.compile` leaves behind is as
bad: thousands of small blocks that become such holes when they are freed. Taken are
addresses that the heap has once used, so they are bounded by its largest size.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

_log = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_MALLOC_THRESHOLD = 65536
_MAPPED = 2
"""The flag of glibc's IS_MMAPPED."""
_LARGEST_HOLE = 2**28

_thresholds_set = False


def give_back_freed_memory() -> None:
    """Make glibc give freed blocks back to the system, for the whole process.

    See the notes above; the thresholds are set once, the holes filled each time.

    Raises:
        OSError: The C library is another, or refuses.
    """
    global _thresholds_set
    if not _thresholds_set:
        _set_thresholds()
        _thresholds_set = True
    _fill_holes(ctypes.CDLL(None))


def _set_thresholds() -> None:
    if platform.libc_ver()[0] != "glibc":
        msg = "the C library is not glibc, and what it keeps after a free is unknown"
        raise OSError(msg)
    libc = ctypes.CDLL(None)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        if libc.mallopt(option, _MALLOC_THRESHOLD) != 1:
            msg = f"mallopt({option}, {_MALLOC_THRESHOLD}) failed"
            raise OSError(msg)
    _log.info(
        "mimose: set glibc's mmap and trim thresholds to %d bytes for this process, so "
        "that freed memory goes back to the system and the resident set can be read",
        _MALLOC_THRESHOLD,
    )


def _fill_holes(libc: ctypes.CDLL) -> None:
    """Take what large blocks would be served from: see Note: [Holes from before].

    The word before a block has its size and, in glibc, a flag where the block was
    mapped for itself. Such a block did not come from a hole, and goes back.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.malloc_trim(0)
    size = _LARGEST_HOLE
    while True:
        block = libc.malloc(size)
        if block is not None:
            word = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t))
            if not 0 < (word.value & ~7) - size <= 2 * _PAGE:
                libc.free(block)
                _log.warning(
                    "mimose: malloc is not glibc's (is another one preloaded?), and "
                    "what it keeps after a free is unknown: peaks may be misread"
                )
                return
            if not word.value & _MAPPED:
                continue  # it came from a hole, and stays
            libc.free(block)
        if size == _MALLOC_THRESHOLD:
            break
        size = max(size * 7 // 8, _MALLOC_THRESHOLD)
    libc.malloc_trim(0)
