"""What ranks find out of their layers in a session's first forward.

Note: [The first forward]
That a layer cannot be recomputed shows where its calls are looked at first. Then the
forward is run again, with the layer kept. Where other ranks wait for a forward, one
that ran it again alone would send what nobody receives, or what is taken for something
else; and what shows may depend on the batch, as with a table that grows with the
longest text so far. So behind the first forward that comes to its end the ranks that
wait for each other exchange one vector, of which each element's maximum is taken: who
has found something, whose forward has changed what it was given, and which layers each
keeps. Where one has found something, all keep these layers and all run again, until
none finds any more. That moment comes once for each rank. What is found later is an
error, and nobody runs anything again.

What waits in a forward of FSDP2 is the group that its weights are sharded over, so that
carries the vector where the ranks do not agree anyway; all its ranks have sent the same
before, in the same order. A group that leaves somebody out who waits is not used: then
what is found in the first forward is an error, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed, nn

from mimose.distributed.agreement import KEPT_ELSEWHERE, Agreement
from mimose.distributed.exchange import Exchange
from mimose.distributed.others import why_forward_waits
from mimose.exactness.unit import Unit
from mimose.exceptions import NotRecomputableError
from mimose.inputs.communicating import communicates
from mimose.inputs.sharding import groups_in
from mimose.torch_private import shard_group


class FirstForward:
    """Makes what a rank finds out in its first forward what all find out.

    Args:
        model: The root.
        units: Its units.
        agreement: With other ranks, if there is any.

    Attributes:
        is_over: Whether nothing is exchanged any more.
        is_common: Whether all ranks have the error that was settled last.
        all_run_again: Whether all run that forward again.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], agreement: Agreement
    ) -> None:
        self._model = model
        self._units = units
        self._agreement = agreement
        self._exchange: Exchange | None = None
        self.is_over = False
        self.is_common = self.all_run_again = False

    def settle(
        self, error: NotRecomputableError | None, *, is_repeatable: bool
    ) -> NotRecomputableError | None:
        """Return what the ranks have found in a forward that came to its end.

        Args:
            error: What this one has.
            is_repeatable: Whether it could run it again.

        Raises:
            MimoseError: Another rank is gone, or does not answer.
        """
        self.is_common = self.all_run_again = False
        exchange = self._exchange or self._meeting()
        if exchange is None:
            self.is_over = True
            return error
        self._exchange = exchange
        kept = [int(unit.is_kept) for unit in self._units]
        has_found, is_stuck, *found = exchange.maxima(
            [int(error is not None), int(not is_repeatable), *kept]
        )
        if not has_found:
            self.is_over = True
            return None
        self.is_common, self.all_run_again = True, not is_stuck
        pairs = zip(self._units, found, strict=False)
        names = {unit.index: unit.name for unit, is_kept in pairs if is_kept}
        return error or NotRecomputableError(names, KEPT_ELSEWHERE)

    def _meeting(self) -> Exchange | None:
        """Return the exchange with all who wait for a forward, if there is one."""
        if not why_forward_waits(self._model, self._units):
            return None
        waiting = list(_groups(self._model))
        exchange = self._agreement.exchange
        if exchange is None:
            if not waiting:
                return None
            exchange = Exchange(*waiting[0])
            exchange.n_values = 2 + len(self._units)
            if exchange.n_ranks < distributed.get_world_size() and _sends(self._model):
                return None
        ranks = set(distributed.get_process_group_ranks(exchange.group))
        others = (distributed.get_process_group_ranks(group) for group, _ in waiting)
        return exchange if all(map(ranks.issuperset, others)) else None


def _groups(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the process groups that a forward of FSDP2 or DDP waits in, and where."""
    for _, group in groups_in(model):
        over = shard_group(group)
        if over is not None:
            yield over, group.mesh_info.mesh.device_type
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield module.process_group, next(module.parameters()).device.type


def _sends(model: nn.Module) -> bool:
    """Whether a module sends something besides: batch norm, tensor parallelism."""
    return any(communicates(m) for m in model.modules() if not any(m.children()))
