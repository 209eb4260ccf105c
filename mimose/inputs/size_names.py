"""What a size of the batch is called: as whoever passes it would call it.

Note: [A size's name]
Sizes that are always equal count as one, and one of their names stands for all. It is
that of what the model is about, if it is among them: a text is told as ``input_ids``
rather than by its mask. A tensor passed by position is called as the model's forward
calls it, where it has a name for it.
"""

from __future__ import annotations

from collections.abc import Sequence

COUNT = "count"
"""What the number of a list's tensors is called, behind the list's path."""
_FIRST = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""What models of transformers are about, in this order."""
_LAST = ("label", "token_type", "position", "mask")
"""What belongs to something else; masks say least."""


def spoken(name: str, positional: Sequence[str]) -> str:
    """Return a size's name, with the argument's in place of its position.

    Args:
        name: `path.dimension`, the path beginning with a name or a position.
        positional: The arguments' names, by position.

    >>> spoken("0.1", ["ids"]), spoken("1.1", ["ids"]), spoken("mask.1", ["ids"])
    ('ids.1', '1.1', 'mask.1')
    """
    first, dot, rest = name.partition(".")
    is_known = first.isdecimal() and int(first) < len(positional)
    return positional[int(first)] + dot + rest if is_known else name


def rank(name: str) -> int:
    """Return which of several names is to stand for all: that of the lowest rank."""
    *path, _ = name.split(".")
    if path and path[-1] in _FIRST:
        return _FIRST.index(path[-1])
    found = [i for i, word in enumerate(_LAST, start=1) if word in name]
    return len(_FIRST) + max(found, default=0)
