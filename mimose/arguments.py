"""What `attach` is given, checked once, at the door."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import distributed, nn


def check_choices(
    on_infeasible: str,
    cache_size: int,
    max_records: int,
    round_to: int | Mapping[str, int],
) -> None:
    """Make sure that the arguments that are plain values can be used.

    Raises:
        ValueError: One cannot; the message has it, and what it may be.
    """
    if on_infeasible not in ("raise", "warn"):
        msg = f"on_infeasible must be 'raise' or 'warn', got {on_infeasible!r}"
        raise ValueError(msg)
    for name, count in (("cache_size", cache_size), ("max_records", max_records)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            msg = f"{name} must be an integer of at least 1, got {count!r}"
            raise ValueError(msg)
    steps = list(round_to.values()) if isinstance(round_to, Mapping) else [round_to]
    if any(isinstance(step, bool) or not isinstance(step, int) for step in steps):
        msg = (
            f"round_to must be an integer, or map sizes' names to integers, as in "
            f"{{'input_ids.1': 8}}, got {round_to!r}"
        )
        raise ValueError(msg)
    if any(step < 1 for step in steps):
        msg = f"round_to must be at least 1 for every size, got {round_to!r}"
        raise ValueError(msg)


def check_agree(agree: object) -> None:
    """Make sure that ranks can agree as they are asked to.

    Raises:
        TypeError: It is neither a word nor a group.
        ValueError: It is another word, or a group that cannot carry the CPU's tensors,
            or that this rank is no part of.
    """
    if agree is None or agree == "auto":
        return
    if not (distributed.is_available() and distributed.is_initialized()):
        msg = (
            f"agree must be 'auto' or None as long as torch.distributed is not "
            f"initialised, got {agree!r}"
        )
        raise ValueError(msg)
    if isinstance(agree, str) or not isinstance(agree, distributed.ProcessGroup):
        msg = f"agree must be 'auto', None or a process group, got {agree!r}"
        raise ValueError(msg) if isinstance(agree, str) else TypeError(msg)
    if distributed.get_rank(agree) < 0:
        msg = (
            f"agree: rank {distributed.get_rank()} is no part of the group that it was "
            f"given; give each rank a group that it is in"
        )
        raise ValueError(msg)
    config = str(distributed.get_backend_config(agree))
    if "cpu" not in config:
        msg = (
            f"agree: the group is one of {config!r}, which carries no tensors of the "
            f"CPU: give torch.distributed.new_group(backend='gloo')"
        )
        raise ValueError(msg)


def check_max_error(max_error: float | None) -> None:
    """Make sure that a bound on gradients' errors can be used.

    Raises:
        ValueError: It is no number above 0.
    """
    if max_error is None:
        return
    is_number = isinstance(max_error, (int, float)) and not isinstance(max_error, bool)
    if not is_number or not max_error > 0.0:
        msg = (
            f"max_error must be None or a number above 0, a part of the gradient's "
            f"norm such as 0.01, got {max_error!r}"
        )
        raise ValueError(msg)


def check_watched(loader: object, ahead: int) -> None:
    """Make sure that batches can be taken from a loader, and so many ahead.

    Raises:
        TypeError: The loader cannot be iterated over.
        ValueError: The number is not one.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        msg = f"watch needs an iterable of batches, got {loader!r}"
        raise TypeError(msg)
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        msg = f"ahead must be an integer of at least 0, got {ahead!r}"
        raise ValueError(msg)


def check_shapes(shapes: Iterable[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Return shapes that are told by name, as a list.

    Raises:
        TypeError: One is no mapping, or is not iterable.
        ValueError: A size is no integer of at least 1.
    """
    if isinstance(shapes, Mapping):
        msg = f"expect needs several shapes, such as [{dict(shapes)!r}], got one"
        raise TypeError(msg)
    listed: list[Any] = list(shapes)
    for shape in listed:
        if not isinstance(shape, Mapping):
            msg = (
                f"expect needs shapes as mappings of names to sizes, such as "
                f"{{'input_ids.1': 512}}, got {shape!r}"
            )
            raise TypeError(msg)
        for name, size in shape.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                msg = f"expect: {name} must be an integer of at least 1, got {size!r}"
                raise ValueError(msg)
    return listed


def refuse_no_model(model: object) -> None:
    """Make sure that there is a model.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(model, nn.Module):
        msg = f"a session needs a model, a torch.nn.Module, got {model!r}"
        raise TypeError(msg)
