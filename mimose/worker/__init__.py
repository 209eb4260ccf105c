"""Work beside training: one thread a session, and a twin that does it at once.

Jobs are closures over immutable values. They touch no tensor and no module. No torch.
"""

from mimose.worker.base import Background, Lane
from mimose.worker.inline import Inline
from mimose.worker.thread import Daemon

__all__ = ["Background", "Daemon", "Inline", "Lane", "make_background"]


def make_background(*, is_inline: bool) -> Background:
    """Return a daemon, or its twin.

    Args:
        is_inline: Whether work is to be done at once.
    """
    return Inline() if is_inline else Daemon()
