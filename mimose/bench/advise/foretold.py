"""What a session's steps tell of the device's speed."""

from __future__ import annotations

import statistics

from mimose.exceptions import MimoseError
from mimose.session import Session


def flop_seconds(session: Session) -> float:
    """Return what a FLOP took, the median of the steps that ran.

    Training a layer takes three times its forward, which is what recomputing it costs.

    Args:
        session: One that has learned.
    """
    found, trained = [], dict[tuple[tuple[str, int], ...], float]()
    for record in session.records:
        shape = tuple(record.shape.items())
        try:
            if shape not in trained:
                problem = session.planning_problem(record.shape)
                trained[shape] = 3.0 * float(problem.cost[:, -1].sum())
        except MimoseError:
            continue
        flops = trained[shape] + record.recomputed_flops
        if record.seconds and flops:
            found.append(record.seconds / flops)
    return statistics.median(found)
