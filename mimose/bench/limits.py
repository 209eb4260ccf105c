"""A hard memory limit for a process, in the terms of a budget."""

from __future__ import annotations

import resource

from mimose.bench.machine import kernel_bytes

SLACK_BYTES = 32 * 2**20
"""What a process may map beyond the budget; see `limit_memory`."""


def limit_memory(budget_bytes: int, resident_bytes: int) -> None:
    """Make allocations fail that would take this process beyond a budget.

    ``RLIMIT_DATA`` bounds what a process has mapped writable and private, and the
    budget is about what is resident. Both grow by a tensor's bytes when it is
    allocated, so the limit is what is mapped now plus what the budget leaves over
    what is resident now, plus `SLACK_BYTES` for what is mapped and never touched:
    thread stacks, arenas, a library that is loaded late.

    To be called when a step begins, since such mappings add up over the steps: oneDNN
    alone maps 256 KiB for every kernel that it generates for a new shape, and touches
    4 KiB of them.
    """
    mapped = kernel_bytes("/proc/self/status", "VmData")
    if mapped is None:
        msg = "/proc/self/status has no VmData: memory can be limited on Linux only"
        raise OSError(msg)
    room = max(0, budget_bytes - resident_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (mapped + room + SLACK_BYTES, hard))
