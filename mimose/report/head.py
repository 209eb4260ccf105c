"""What a head costs where it makes the peak, and what would take less."""

from __future__ import annotations

from collections.abc import Iterator

from mimose.budget import format_bytes
from mimose.planners import Timeline

_HEAD = "head"


def head_advice(laid_out: Timeline, *, by_rows: bool) -> Iterator[str]:
    """Yield what there is to say of a head that makes the peak; else nothing.

    Args:
        laid_out: The step under its plan.
        by_rows: Whether its loss is computed by rows where that pays.
    """
    if _HEAD not in laid_out.binding_segments:
        return
    at = laid_out.segments.index(_HEAD)
    peaks = laid_out.peak_bytes_by_segment
    own = float(peaks[at] - laid_out.level_bytes[at])
    others = [(float(p), i) for i, p in enumerate(peaks.tolist()) if i != at]
    next_peak, next_at = max(others)
    yield (
        f"the head takes {format_bytes(own)} of it, of a language model for its "
        f"logits, their loss and gradients; without them this plan would peak at "
        f"{format_bytes(next_peak)}, in the {laid_out.segments[next_at]}"
    )
    if not by_rows:
        yield (
            "mimose.cross_entropy gives the same bits for less of that; losses of "
            "transformers' own use it where the budget asks for it"
        )
    freed = format_bytes(laid_out.peak_bytes - next_peak)
    yield (
        f"a loss that never makes all logits (Liger's fused linear cross-entropy, "
        f"torchtune's chunked loss) would free up to {freed}; it rounds otherwise"
    )
