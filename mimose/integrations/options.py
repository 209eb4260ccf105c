"""What a callback is given for `attach`, checked where it is written."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mimose.near_names import near_names
from mimose.session import attach


def check_options(
    callback: str, budget: float | str | None, options: Mapping[str, Any]
) -> None:
    """Make sure that `attach` takes these options.

    Args:
        callback: Who is given them, for the error.
        budget: The budget.
        options: The others, by name.

    Raises:
        TypeError: It does not take one.
    """
    try:
        inspect.signature(attach).bind(None, budget, **options)
    except TypeError as error:
        known = list(inspect.signature(attach).parameters)[2:]
        meant = [
            near
            for name in options
            if name not in known
            for near in near_names(name, known)
        ]
        hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
        msg = f"{callback}: {error}{hint}"
        raise TypeError(msg) from None
