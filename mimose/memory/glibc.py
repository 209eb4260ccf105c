"""Making glibc's heap give freed memory back, so that the resident set can be read.

Note: [The allocator's thresholds]
glibc keeps what is freed, and readings of the resident set then mean nothing. Two
`mallopt` thresholds of 64 KiB make it give every larger block back. They hold for
the whole process and stay after the session; steps take longer for it (page
faults), so in a comparison every strategy has to run with them.

Note: [Holes]
The heap has large holes: left from training before the thresholds were set, or, between
any two steps, where the gradients of small weights and the nodes of the graph were.
malloc serves from them first, whatever the thresholds, and what is freed into them
stays resident: what a step of 80 MiB grew by was read as anything from 0 to 90. So
holes of 64 KiB and more are taken, 256 MiB in all at the most, whenever the heap is
trimmed between steps, until it is trimmed the next time; trimmed first, they hold
addresses but next to no memory.
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
"""The flag of glibc's IS_MMAPPED, in the word before a block."""
_MOST = 2**28
"""Bytes of addresses taken at the most. Small blocks that find no hole make the heap
grow, and if some of them stay, the next step's do so again."""
_SIZES = [*(int(_MOST * (7 / 8) ** n) for n in range(63)), _MALLOC_THRESHOLD]
"""Asked for in turn, so that no more than an eighth of a hole is left over."""


@functools.cache
def give_back_freed_memory() -> None:
    """Make glibc give freed blocks back to the system, for the whole process.

    See Note: [The allocator's thresholds]; they are set once.

    Raises:
        OSError: The C library, or the malloc in use, is another, or it refuses.
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
    """The heap's large holes, so that nothing is served from them: Note: [Holes]."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._libc = libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        weakref.finalize(self, _free, libc, self._blocks)

    def fill(self) -> None:
        """Give what is free in the heap back to the system, and take the holes."""
        self.release()
        self._libc.malloc_trim(0)
        room = _MOST
        for size in _SIZES:
            while size <= room and self._takes(size):
                room -= size

    def release(self) -> None:
        """Leave the holes to whoever needs memory."""
        _free(self._libc, self._blocks)

    def _takes(self, size: int) -> bool:
        """Take one hole, if there is one of this size.

        A block that was mapped for itself did not come from a hole, and goes back, as
        does one for which the heap has grown.
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
