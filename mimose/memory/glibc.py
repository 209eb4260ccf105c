"""Making glibc's heap give freed memory back, so that the resident set can be read.

Note: [The allocator's thresholds]
glibc keeps what is freed, and readings of the resident set then mean nothing. Two
`mallopt` thresholds of 64 KiB make it give every larger block back. They hold for
the whole process and stay after the session; steps take longer for it (page
faults), so in a comparison every strategy has to run with them.

Note: [Holes]
The heap has large holes: left from training before the thresholds were set, by
`torch.compile`, or, between any two steps, where the gradients of small weights and the
nodes of the graph were. malloc serves from them first, whatever the thresholds, and
what is freed into them stays resident: what a step of 80 MiB grew by was read as
anything from 0 to 90, and the first layers of a small transformer seemed to hold up to
10 MiB that they did not. So holes of 64 KiB and more are taken, 256 MiB in all at the
most, whenever the heap is trimmed between steps, until it is trimmed the next time;
trimmed first, they hold addresses but next to no memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import weakref

_log = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_MALLOC_THRESHOLD = 65536
_WORD = ctypes.sizeof(ctypes.c_size_t)
_MAPPED = 2
"""The flag of glibc's IS_MMAPPED."""
_INFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_MOST = 2**28
"""Bytes of addresses taken at the most. Small blocks that find no hole make the heap
grow, and if some of them stay, the next step's do so again."""
_SIZES = [*(int(_MOST * (7 / 8) ** n) for n in range(63)), _MALLOC_THRESHOLD]
"""Asked for in turn, so that no more than an eighth of a hole is left over."""

_thresholds_set = False


def give_back_freed_memory() -> None:
    """Make glibc give freed blocks back to the system, for the whole process.

    See Note: [The allocator's thresholds]; they are set once.

    Raises:
        OSError: The C library is another, or refuses.
    """
    global _thresholds_set
    if not _thresholds_set:
        _set_thresholds()
        _thresholds_set = True


class _Info(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _INFO)


class HeapFiller:
    """The heap's large holes, so that nothing is served from them: Note: [Holes]."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._is_foreign = False
        self._libc = libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        if hasattr(libc, "mallinfo2"):
            libc.mallinfo2.restype, libc.mallinfo2.argtypes = _Info, []
        weakref.finalize(self, _free, libc, self._blocks)

    def fill(self) -> None:
        """Give what is free in the heap back to the system, and take the holes."""
        self.release()
        self._libc.malloc_trim(0)
        room = min(_MOST, self._free_bytes())
        for size in _SIZES:
            while size <= room and self._takes(size):
                room -= size

    def release(self) -> None:
        """Leave the holes to whoever needs memory."""
        _free(self._libc, self._blocks)

    def _free_bytes(self) -> int:
        """Return what is free in the heap, which no hole is larger than."""
        if not hasattr(self._libc, "mallinfo2"):  # glibc before 2.33
            return _MOST
        return int(self._libc.mallinfo2().fordblks)

    def _takes(self, size: int) -> bool:
        """Take one hole, if there is one of this size.

        The word before a block has its size and, in glibc, a flag where the block was
        mapped for itself. Such a block did not come from a hole, and goes back, as does
        one for which the heap has grown.
        """
        if self._is_foreign:
            return False
        end = self._libc.sbrk(0)
        block = self._libc.malloc(size)
        if block is None:
            return False
        word = ctypes.c_size_t.from_address(block - _WORD).value
        is_glibc = 0 < (word & ~7) - size <= 2 * _PAGE
        if is_glibc and not word & _MAPPED and self._libc.sbrk(0) == end:
            self._blocks.append(block)
            return True
        self._libc.free(block)
        if not is_glibc:
            self._give_up()
        return False

    def _give_up(self) -> None:
        self._is_foreign = True
        _log.warning(
            "mimose: malloc is not glibc's (is another one preloaded?), and what it "
            "keeps after a free is unknown: peaks may be misread"
        )


def _free(libc: ctypes.CDLL, blocks: list[int]) -> None:
    while blocks:
        libc.free(blocks.pop())


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
