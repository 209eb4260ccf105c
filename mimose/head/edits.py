"""What tells logits from others: they are read again in backward, edited or not.

Plain cross-entropy has saved its log-softmax by then, so an edit of the logits does it
no harm; here it would change gradients without a word. Autograd counts edits of
tensors, but not those by ``.data`` or by an array of numpy's. So the sum of the logits'
words is kept, and each row's loss, which another order would change.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from mimose.exceptions import RecomputationError
from mimose.tensors import different_bits
from mimose.torch_private import queue_callback

_EDITED = (
    "logits (or their labels) were edited between a loss that goes by rows and its "
    "backward, which reads them again: zero this step's gradients, and edit a copy "
    "(logits.detach().clone()), or edit them after the backward; or let the loss save "
    "what it needs: by torch.nn.functional.cross_entropy in place of "
    "mimose.cross_entropy, and in a session of a model of transformers by a "
    "model.loss_function of your own"
)


class Known(NamedTuple):
    """What logits are known by."""

    losses: torch.Tensor
    """(N,) of each row."""
    words: torch.Tensor
    """The sum of their bits, in integers of 8 bytes."""


def nothing_known(logits: torch.Tensor, dtype: torch.dtype) -> Known:
    """Return what is to be filled in, chunk by chunk.

    Args:
        logits: (N, V).
        dtype: Of the losses.
    """
    words = torch.zeros((), dtype=torch.int64, device=logits.device)
    return Known(torch.empty(len(logits), dtype=dtype, device=logits.device), words)


def refuse_edited(known: Known, again: Known) -> None:
    """Make sure in a backward that logits are what they were.

    An accelerator is waited for when the backward has ended, so that it has work until
    then. While it records a graph nobody can wait, and no host edits anything.

    Args:
        known: What was seen in the forward.
        again: What is seen now.

    Raises:
        RecomputationError: They are not; on an accelerator from the backward's end.
    """
    is_other = different_bits(known.losses, again.losses)
    if isinstance(is_other, bool):
        if is_other or not torch.equal(known.words, again.words):
            refuse()
        return
    flag = is_other | (known.words != again.words)
    if not _is_recorded(flag):
        queue_callback(lambda: refuse() if bool(flag) else None)


def refuse(error: BaseException | None = None) -> NoReturn:
    """Raise the error that says what was edited.

    Args:
        error: What it follows from.

    Raises:
        RecomputationError: Always.
    """
    raise RecomputationError(_EDITED) from error


def _is_recorded(tensor: torch.Tensor) -> bool:
    module = torch.get_device_module(tensor.device)
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())
