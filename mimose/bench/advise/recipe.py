"""What to write to train as a method did when it was measured."""

from __future__ import annotations

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.methods import METHODS, PARTS, PLAIN
from mimose.planners import Everywhere

_WITHOUT_A_SESSION = {
    PLAIN: ("# nothing to change: train as you do",),
    "sdpa": ('model.set_attn_implementation("sdpa")',),
    "accumulate": (
        f"for part in parts:  # {PARTS} of a batch",
        f"    (loss_of(part) / {PARTS}).backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
    ),
}
_NEAR = 1.1
"""Beyond such a ratio the slower one is none to try, however large the noise."""
_MIB = 2**20
_GIB = 2**30


def recommended(advice: Advice) -> list[str]:
    """Return the methods to choose from, those that nearly tie among them.

    Plain training alone where it ties: it needs no change.

    Args:
        advice: The answer.
    """
    found = []
    for choice in (advice.at_sample, advice.free):
        if choice is None:
            continue
        if choice.is_tie and PLAIN in (choice.name, choice.runner_up):
            found.append(PLAIN)
            continue
        near = choice.is_tie and choice.ratio <= _NEAR
        found += [choice.name, *([choice.runner_up] if near else [])]
    return list(dict.fromkeys(found))


def recipe(name: str, budget_bytes: int) -> list[str]:
    """Return lines of Python that train so.

    Args:
        name: A method's.
        budget_bytes: The memory.
    """
    method = METHODS[name]
    if method.options is None:
        return list(_WITHOUT_A_SESSION[name])
    given = [f"{key}={_value(value)}" for key, value in method.options.items()]
    lines = ["import mimose"]
    if any(isinstance(value, Everywhere) for value in method.options.values()):
        lines.append("from mimose.planners import Everywhere")
    call = ", ".join(["model", f'"{_budget(budget_bytes)}"', *given])
    return [*lines, "", f"mimose.attach({call})"]


def _value(value: object) -> str:
    if isinstance(value, Everywhere):
        return f'Everywhere("{value.action}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _budget(n_bytes: int) -> str:
    """Write a budget as `mimose.attach` takes it, rounded down to whole MiB."""
    if n_bytes % _GIB == 0:
        return f"{n_bytes // _GIB}GiB"
    return f"{n_bytes // _MIB}MiB" if n_bytes >= _MIB else f"{n_bytes}B"
