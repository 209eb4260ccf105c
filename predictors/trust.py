"""Whether a fit may be asked about a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def covers(
    low: Sequence[float],
    high: Sequence[float],
    sizes: Sequence[float],
    stretch: float = 1.0,
) -> bool:
    """Return whether sizes lie within what a fit has seen.

    A size that varied may reach ``high * stretch``; one that never did says nothing
    about its effect and may not exceed the value seen. There is no lower bound:
    below ``low`` the caller raises the size to ``low``, since a smaller input needs
    no more memory than a larger one.

    Args:
        low: Smallest size seen, by column.
        high: Largest size seen, by column.
        sizes: The sizes asked about, by column.
        stretch: At least 1; above 1 only where the fit is exact.

    Raises:
        ValueError: If the lengths differ or ``stretch`` is below 1.
    """
    if stretch < 1.0:
        msg = f"stretch must be at least 1, got {stretch!r}."
        raise ValueError(msg)
    return all(
        size <= (most * stretch if least < most else most)
        for least, most, size in zip(low, high, sizes, strict=True)
    )
