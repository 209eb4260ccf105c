"""What an exchange between ranks takes: by formulas, and measured on this machine.

Formulas are latency and bytes over bandwidth, summed over an algorithm's messages
(Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in
MPICH*, 2005). NCCL's numbers are those of its own tuning model, of the protocol LL
(``src/graph/tuning.cc`` at 01afd20). What TCP takes is an assumption, 25 µs one way and
as much again twice for a call; torch's gloo uses its ring.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from mimose.run.exchange import WORD_BYTES

_RANKS_A_NODE = 8
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Network:
    """How ranks talk, in seconds and bytes a second."""

    name: str
    algorithm: str
    """``"ring"`` or ``"tree"``."""
    base_seconds: float
    """Of a call, whatever it sends."""
    inside_seconds: float
    """Latency of a message between ranks of one machine."""
    between_seconds: float
    """Latency of a message between machines."""
    bytes_per_second: float


NETWORKS = (
    # Gloo knows no machines: each message is taken for one over the network.
    Network("gloo over TCP", "ring", 50e-6, 25e-6, 25e-6, 1.25e9),
    Network("a tree over TCP", "tree", 50e-6, 25e-6, 25e-6, 1.25e9),
    Network("NCCL", "ring", 3.6e-6, 0.47e-6, 2.7e-6, 12.5e9),
    Network("NCCL", "tree", 4.4e-6, 0.52e-6, 5.0e-6, 12.5e9),
)
"""10 Gbit/s for gloo, 100 Gbit/s for NCCL."""


def all_reduce_seconds(network: Network, n_ranks: int, n_bytes: float) -> float:
    """Return what all ranks wait for a result of all."""
    if n_ranks == 1:
        return 0.0
    n_nodes = max(1, n_ranks // _RANKS_A_NODE)
    if network.algorithm == "ring":
        n_messages, n_between = 2 * (n_ranks - 1), 2 * (n_nodes - 1)
        sent = 2.0 * n_bytes * (n_ranks - 1) / n_ranks
    else:
        n_between = 2 * math.ceil(math.log2(n_nodes))
        n_messages = n_between + 2 * math.ceil(math.log2(min(n_ranks, _RANKS_A_NODE)))
        sent = n_messages * n_bytes
    inside = (n_messages - n_between) * network.inside_seconds
    latency = network.base_seconds + inside + n_between * network.between_seconds
    return latency + sent / network.bytes_per_second


def measured_seconds(n_ranks: int, n_bytes: int, rounds: int) -> list[float]:
    """Return what all-reduces took the first of some gloo processes, one after another.

    Raises:
        RuntimeError: A process failed, or came to no end.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        shared = (n_ranks, f"file://{folder}/store", n_bytes, rounds)
        processes = [
            context.Process(target=_exchange, args=(rank, *shared, sender), daemon=True)
            for rank in range(n_ranks)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not receiver.poll(_LIMIT_SECONDS):
                msg = f"{n_ranks} processes came to no end in {_LIMIT_SECONDS:.0f} s"
                raise RuntimeError(msg)
            try:
                found: list[float] = receiver.recv()
            except EOFError:
                msg = f"one of {n_ranks} processes that exchange has failed"
                raise RuntimeError(msg) from None
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return found


def _exchange(
    rank: int, n_ranks: int, store: str, n_bytes: int, rounds: int, sender: Any
) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=n_ranks
    )
    vector = torch.zeros(n_bytes // WORD_BYTES, dtype=torch.int64)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        distributed.all_reduce(vector, op=distributed.ReduceOp.MAX)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        sender.send(seconds[rounds // 10 :])  # the first make connections
    distributed.barrier()
    distributed.destroy_process_group()
