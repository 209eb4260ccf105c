"""The hollow card: the simulated accelerator at the true size of models and cards.

A hollow device computes nothing. Shapes, dtypes, strides, aliases and every byte of the
allocator are as on the device that computes. A clock adds the time that a card with
given rates would take. So an 8B model trains on an 80 GiB card in a tenth of a second a
step, in half a GiB of host memory.

Note: [What a hollow card does not model]
Each kernel takes its launch and, by the roofline, the longer of the times for its FLOPs
and its bytes at the card's rates: large and small products reach the same share of the
peak. Without a `Host`, the clock only adds the device's time.
Workspaces are those of cuBLAS and of attention backwards; cuDNN, cuBLASLt, cub, the
CUDA context and NCCL take none. The allocator keeps blocks by stream, as CUDA's does,
but frees at once what `record_stream` lets CUDA free later. A tensor of more than 256
bytes (of integers, 4 MiB) reads as zero, so values of losses and gradients mean
nothing. Operators whose output size depends on the data of a large tensor raise an
error.

Note: [The user's clock]
A user waits for the longer of two timelines. The host issues each operator at a price,
at most 1,024 kernels ahead; the device runs a kernel when it is issued and the one
before has ended. The host waits for the device as on CUDA: to free a segment, and to
read a value. On Hopper it builds cuDNN's plans of attention. Python that is no operator
is charged by `pass_on_host`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from mimose.sim.indices import Device, index_of

__all__ = [
    "CARDS",
    "HOST",
    "LINKS",
    "Card",
    "Clock",
    "Host",
    "Link",
    "clock",
    "forget_attention_plans",
    "pass_on_host",
    "set_hollow",
    "set_link",
]


@dataclass(frozen=True, slots=True)
class Card:
    """What a card reaches, a second; see `CARDS` for the sources.

    The costs of the allocator's calls and of a kernel that does nothing are those that
    `benchmarks.check` has measured of an H200 (``docs/results/nvidia-h200``), and taken
    to be alike on all cards.
    """

    name: str
    half_flops: float
    """FLOPs of products in bfloat16 and float16."""
    single_flops: float
    """FLOPs in float32, without TF32."""
    tf32_flops: float
    """FLOPs in float32 where torch's flags allow TF32."""
    memory_bytes: float
    """Bytes to and from its memory."""
    host_bytes: float
    """Bytes between it and pinned host memory."""
    blas_workspace: float
    """Bytes that cuBLAS holds from the first product on."""
    launch: float = 1e-6
    """Seconds of a kernel that does nothing."""
    segment: float = 5e-5
    """Seconds of a ``cudaMalloc`` or ``cudaFree``, ..."""
    segment_byte: float = 3.3e-13
    """... and of each byte, in the mean of both: a GiB takes 0.15 ms, and 0.55 to free.
    """
    granule: float = 3.7e-5
    """Seconds of mapping or unmapping 20 MiB of an expandable segment."""
    attention_plan: float = 0.0
    """Seconds of the host in which cuDNN builds a plan of attention in half precision,
    once for each signature and thread; 0: it does not come first on the card."""


def _card(
    name: str,
    half: float,
    single: float,
    tf32: float,
    memory: float,
    *others: float,
    **more: float,
) -> Card:
    """Return a card; rates are in TFLOP/s and TB/s."""
    rates = 1e12 * half, 1e12 * single, 1e12 * tf32, 1e12 * memory
    return Card(name, *rates, *others, **more)


# Dense peaks and bandwidths are those of NVIDIA's data sheets: H100 SXM5 989 and 67
# TFLOP/s, 3.35 TB/s; A100 SXM4 80 GB 312 and 19.5, 2.04; RTX 4090 165 and 82.6, 1.01;
# A10 125 and 31.2, 0.6. Training reaches about half of an H100's half-precision peak,
# 60 to 70% of the others', and 90% of a bandwidth, 80% on an A100. PCIe 5.0 x16 copies
# 50 GB/s at best, of which 25 are counted; 4.0 copies 20. Workspaces are torch's:
# `CUBLAS_WORKSPACE_CONFIG` in its documentation.
# TF32's dense peaks are half of half precision's (RTX 4090: 82.6), of which half is
# reached, as on an A100.
# An H200's are those that training was seen to reach on one: its products ran at 700 to
# 767 TFLOP/s, copies at 4.2 TB/s, those to the host at 55 GB/s.
# From torch 2.11 on cuDNN's attention comes first on Hopper, and builds a plan for each
# signature in each thread: 23 to 37 ms in public reports (FunASR#3704), 37 ms in the
# three plans of 110 ms that a new length of BERT-large took on an H200.
CARDS = {
    "h200": _card("H200", 680, 50, 340, 4.0, 50e9, 32 << 20, attention_plan=37e-3),
    "h100": _card("H100", 480, 42, 240, 3.0, 25e9, 32 << 20, attention_plan=37e-3),
    "a100": _card("A100", 187, 13.7, 80, 1.6, 20e9, 8 << 20),
    "rtx4090": _card("RTX 4090", 115, 49, 57, 0.9, 20e9, 8 << 20),
    "a10": _card("A10", 80, 20, 40, 0.54, 20e9, 8 << 20),
}
"""Cards by name."""


_name = ""


@dataclass(frozen=True, slots=True)
class Host:
    """What a host takes to issue an operator: seconds."""

    operator: float
    """An operator, of Python or of the graph, that starts a kernel or makes a view."""
    listed: float
    """Each tensor of an operator of lists, as optimizers use them: an assumption, which
    makes 1% of a step of BERT-large."""


HOST = Host(23e-6, 0.8e-6)
"""The host of the H200: see `benchmarks.proofs clock`."""


@dataclass(frozen=True, slots=True)
class Link:
    """How fast ranks exchange, in nodes of eight: see `LINKS`."""

    node_bytes: float
    """Bytes a second of a ring within a node: the bus bandwidth of NCCL's tests."""
    network_bytes: float
    """The same of a ring through several nodes."""
    node_hop: float
    """Seconds of a step of the ring within a node, ..."""
    network_hop: float = 14e-6
    """... and between two."""
    start: float = 8.4e-6
    """Seconds of a collective without any step."""


# Latencies are those by which NCCL chooses (src/graph/tuning.cc, rings, Simple): 3.4 us
# a step over NVLink, 5.7 over PCIe, 14 over a network. Bandwidths that others measured:
# eight H100s 360 GB/s (NVIDIA/nccl-tests#326), 32 nodes of them 200 in an all-gather
# (NVIDIA/nccl#1218); eight A100s 200 (nccl-tests#149), three nodes with four HDR ports
# 85 (nccl-tests#119). Without NVLink: half of what PCIe copies, for each byte goes by
# the host's memory, and a network of 100 Gb; no measurement set these two.
_NVLINK, _PCIE = 3.4e-6, 5.7e-6
LINKS = {
    "h200": Link(360e9, 200e9, _NVLINK),
    "h100": Link(360e9, 200e9, _NVLINK),
    "a100": Link(200e9, 85e9, _NVLINK),
    "rtx4090": Link(10e9, 10e9, _PCIE),
    "a10": Link(10e9, 10e9, _PCIE),
}
"""Links by card."""


class Clock(NamedTuple):
    """What a device has done since the process began."""

    kernels: float
    """Seconds in kernels and copies."""
    allocator: float
    """Seconds in calls that get segments from the device or free them."""
    n_kernels: int
    flops: float
    user: float
    """When the host has issued all, and the device has ended all of it."""
    host: float
    """Seconds that the host has worked, waits aside."""
    n_views: int
    n_listed: int
    """Kernels of tensors in lists, which CUDA starts for many at once."""
    n_attention_plans: int
    collectives: float
    """Seconds of what ranks exchange, whatever runs beside it."""

    def since(self, before: Clock) -> Clock:
        """Return what has passed since another reading."""
        pairs = zip(self, before, strict=True)
        return Clock._make(now - then for now, then in pairs)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.kernels + self.allocator


def set_hollow(card: Card | None, host: Host | None = None) -> None:
    """Let the devices compute nothing from now on, before anything is on them.

    `reset` makes them compute again.

    Args:
        card: How fast they are; None lets them compute. Whether it rounds float32 to
            TF32 is decided now, by torch's flags.
        host: What issues operators; None for one that takes no time.
    """
    global _name
    _name = "" if card is None else card.name
    if card is not None:
        _, half, single, tf32, *others = astuple(card)
        rules: Any = torch.backends
        rates = [
            tf32 if each.fp32_precision == "tf32" else single
            for each in (rules.cuda.matmul, rules.cudnn.conv)
        ]
        torch.ops.sim.set_card(*map(float, (half, *rates, *others)))
        torch.ops.sim.set_host(*(astuple(host) if host else (0.0,) * 2))
    torch.ops.sim.set_hollow(card is not None)


def hollow_name() -> str:
    """Return the name of the card; "" if the devices compute."""
    return _name


def set_link(link: Link) -> None:
    """Let ranks exchange at some speed; they take no time before."""
    torch.ops.sim.set_link(*astuple(link))


def pass_on_host(seconds: float, device: Device = None) -> None:
    """Let the host of a device work on something that is no operator."""
    torch.ops.sim.pass_on_host(index_of(device), seconds)


def forget_attention_plans() -> None:
    """Let threads build their plans of attention anew, as in a new process."""
    torch.ops.sim.forget_attention_plans()


def clock(device: Device = None) -> Clock:
    """Return a device's virtual clock."""
    return Clock(*torch.ops.sim.clock(index_of(device)))
