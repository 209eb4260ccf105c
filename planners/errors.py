"""The error of a budget that no plan can keep.

InfeasibleBudgetError  (ValueError)
"""

from collections.abc import Mapping

_KIB = 2**10
_MIB = 2**20
_GIB = 2**30


def format_bytes(count: float) -> str:
    """Write a number of bytes as people read it: ``"1.50 GiB"``, ``"310.2 MiB"``.

    Args:
        count: Bytes; may be negative.

    Returns:
        The number in the largest of GiB, MiB, KiB and bytes that it fills.
    """
    if abs(count) >= _GIB:
        return f"{count / _GIB:.2f} GiB"
    if abs(count) >= _MIB:
        return f"{count / _MIB:.1f} MiB"
    if abs(count) >= _KIB:
        return f"{count / _KIB:.1f} KiB"
    return f"{count:.0f} bytes"


class InfeasibleBudgetError(ValueError):
    """No choice of actions keeps the step within the budget.

    Attributes:
        budget_bytes: The budget that was asked for.
        least_peak_bytes: The lowest peak that any plan reaches.
        holders: What holds how many bytes at the moment of that lowest peak; the
            values add up to ``least_peak_bytes``.
    """

    def __init__(
        self,
        budget_bytes: float,
        least_peak_bytes: float,
        holders: Mapping[str, float],
        advice: str = "",
    ) -> None:
        """Build the message out of the numbers.

        Args:
            budget_bytes: The budget that was asked for.
            least_peak_bytes: The lowest peak that any plan reaches.
            holders: Bytes held at that peak, by what holds them.
            advice: What to do; "" for what follows from the numbers.
        """
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes
        self.holders = dict(holders)
        self.advice = advice
        super().__init__(self._message())

    def _message(self) -> str:
        missing = self.least_peak_bytes - self.budget_bytes
        parts = [
            f"No plan keeps the budget of {format_bytes(self.budget_bytes)}: the "
            f"lowest reachable peak is {format_bytes(self.least_peak_bytes)}, "
            f"{format_bytes(missing)} more."
        ]
        if self.holders:
            largest_first = sorted(self.holders.items(), key=lambda item: -item[1])
            listed = "; ".join(f"{k}: {format_bytes(v)}" for k, v in largest_first)
            parts.append(f"Held at that peak: {listed}.")
        parts.append(
            self.advice
            or f"Raise the budget to at least {format_bytes(self.least_peak_bytes)}, "
            "use a smaller batch or shorter inputs, or allow actions that hold less."
        )
        return " ".join(parts)

    def __reduce__(
        self,
    ) -> tuple[
        type["InfeasibleBudgetError"], tuple[float, float, dict[str, float], str]
    ]:
        """Pickle by the arguments, for the message is built from them."""
        numbers = self.budget_bytes, self.least_peak_bytes
        return type(self), (*numbers, self.holders, self.advice)
