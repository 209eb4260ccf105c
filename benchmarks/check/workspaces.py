"""What libraries allocate once, for themselves, at their first use.

cuBLAS has a workspace for each thread and stream, torch's allocator serves it, and it
stays: the first product of a thread makes a step's level higher for good. Autograd's
backward runs in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch.nn import functional

from benchmarks.check.line import Line, judged
from benchmarks.proofs.numbers import MIB
from mimose.measure.meters import AllocatorMeter


def in_single(device: torch.device) -> Iterator[Line]:
    """Use each library for the first and the second time, in fp32."""
    yield from _uses(device, torch.float32, "fp32")


def in_half(device: torch.device) -> Iterator[Line]:
    """Go on in bf16."""
    yield from _uses(device, torch.bfloat16, "bf16")


CHECKS = (in_single, in_half)


def _uses(device: torch.device, dtype: torch.dtype, name: str) -> Iterator[Line]:
    meter = AllocatorMeter(device)
    for what, use in _USES.items():
        first = _stays(meter, partial(use, device, dtype))
        again = _stays(meter, partial(use, device, dtype))
        yield judged(
            f"what stays of the first {what}, {name}",
            "nothing of the second",
            f"{_told(first)}; of the second {_told(again)}",
            again == (0, 0),
        )


def _stays(meter: AllocatorMeter, use: Callable[[], object]) -> tuple[int, int]:
    """Return by how many requested and reserved bytes a use raises what is held."""
    meter.give_back()
    before = meter.usage()
    use()
    meter.give_back()
    after = meter.usage()
    requested = after.requested_bytes - before.requested_bytes
    return requested, after.reserved_bytes - before.reserved_bytes


def _told(stays: tuple[int, int]) -> str:
    requested, reserved = (n_bytes / MIB for n_bytes in stays)
    return f"{requested:.2f} MiB requested, {reserved:.2f} reserved"


def _matrix(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(512, 512, device=device, dtype=dtype)


def _product(device: torch.device, dtype: torch.dtype) -> None:
    one = _matrix(device, dtype)
    functional.linear(one, one, one[0])


def _backward(device: torch.device, dtype: torch.dtype) -> None:
    one = _matrix(device, dtype).requires_grad_()
    (one @ one).sum().backward()  # type: ignore[no-untyped-call]


def _attention(device: torch.device, dtype: torch.dtype) -> None:
    shape = 4, 8, 256, 64
    one = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    found = functional.scaled_dot_product_attention(one, one, one, dropout_p=0.1)
    found.sum().backward()  # type: ignore[no-untyped-call]


def _convolution(device: torch.device, dtype: torch.dtype) -> None:
    images = torch.ones(8, 16, 64, 64, device=device, dtype=dtype, requires_grad=True)
    weights = torch.ones(32, 16, 3, 3, device=device, dtype=dtype, requires_grad=True)
    functional.conv2d(images, weights, padding=1).sum().backward()  # type: ignore[no-untyped-call]


_USES: Mapping[str, Callable[[torch.device, torch.dtype], object]] = {
    "product": _product,
    "backward of a product": _backward,
    "attention and its backward": _attention,
    "convolution and its backward": _convolution,
}
