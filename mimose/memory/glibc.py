"""Makes glibc return freed memory to the system, so that the resident set is useful.

Note: [The allocator's thresholds]
glibc keeps freed memory, so the resident set would not show what is in use. Two
`mallopt` thresholds of 64 KiB make it return every larger block to the system. They
apply to the whole process and stay after the session. Steps take longer with them (page
faults), so in a comparison every strategy must run with them.

Note: [Holes]
The heap has large holes: from training before the thresholds were set and, between two
steps, where the gradients of small weights and the nodes of the graph were. malloc uses
these holes first, whatever the thresholds, and memory that is freed into them stays
resident: a step that grew by 80 MiB was read as anything from 0 to 90. So whenever the
heap is trimmed between steps, holes of at least 64 KiB are occupied, 256 MiB at most,
until the next trim. After a trim a hole is a range of addresses with almost no memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from typing import Any

_log = logging.getLogger(__name__)

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_MALLOC_THRESHOLD = 65536
_WORD = ctypes.sizeof(ctypes.c_size_t)
_MAPPED = 2
"""glibc's flag IS_MMAPPED, in the word before a block."""
_MOST = 2**28
"""The most bytes of addresses to occupy. Small blocks that find no hole make the heap
grow, in every step if some of them stay."""
_SIZES = [*(int(_MOST * (7 / 8) ** n) for n in range(63)), _MALLOC_THRESHOLD]
"""The sizes to try, so that at most an eighth of a hole stays free."""


@functools.cache
def return_freed_memory() -> None:
    """Make glibc return freed blocks to the system: Note: [The allocator's thresholds].

    Raises:
        OSError: The C library or the malloc in use is not glibc's, or it refuses.
    """
    libc, used = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
    if _address(libc.malloc) != _address(used.malloc):
        msg = "malloc is not glibc's (another one is preloaded)"
        raise OSError(msg)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        if libc.mallopt(option, _MALLOC_THRESHOLD) != 1:
            msg = f"mallopt({option}, {_MALLOC_THRESHOLD}) failed"
            raise OSError(msg)
    _log.info(
        "mimose: set glibc's mmap and trim thresholds to %d bytes for this process, so "
        "that freed memory goes back to the system and the resident set can be read",
        _MALLOC_THRESHOLD,
    )


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


class HeapFiller:
    """Occupies the heap's large holes: Note: [Holes]."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._libc = libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        weakref.finalize(self, _free, libc, self._blocks)

    def fill(self) -> None:
        """Return the heap's free memory to the system, and occupy the holes."""
        self.release()
        self._libc.malloc_trim(0)
        left = _MOST
        for size in _SIZES:
            while size <= left and self._fills(size):
                left -= size

    def release(self) -> None:
        """Free the blocks that occupy the holes."""
        _free(self._libc, self._blocks)

    def _fills(self, size: int) -> bool:
        """Occupy one hole, if there is one of this size.

        A block that was mapped separately, or for which the heap has grown, is not in a
        hole, and is freed.
        """
        end = self._libc.sbrk(0)
        block = self._libc.malloc(size)
        if block is None:
            return False
        word = ctypes.c_size_t.from_address(block - _WORD).value
        if not word & _MAPPED and self._libc.sbrk(0) == end:
            self._blocks.append(block)
            return True
        self._libc.free(block)
        return False


def _free(libc: ctypes.CDLL, blocks: list[int]) -> None:
    while blocks:
        libc.free(blocks.pop())
