"""Train PyTorch models with variable-size inputs inside a memory budget."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimose.batch_sampler import BatchSampler as BatchSampler
    from mimose.batch_stream import BatchStream as BatchStream
    from mimose.bench.advise.command import advise as advise
    from mimose.bench.rehearse.command import Rehearsal as Rehearsal
    from mimose.bench.rehearse.command import rehearse as rehearse
    from mimose.exceptions import AdviceError as AdviceError
    from mimose.exceptions import AlreadyAttachedError as AlreadyAttachedError
    from mimose.exceptions import BudgetError as BudgetError
    from mimose.exceptions import ChangedWeightsError as ChangedWeightsError
    from mimose.exceptions import (
        CheckpointingConflictError as CheckpointingConflictError,
    )
    from mimose.exceptions import InfeasibleBudgetError as InfeasibleBudgetError
    from mimose.exceptions import LateChangeError as LateChangeError
    from mimose.exceptions import MimoseError as MimoseError
    from mimose.exceptions import NotRecomputableError as NotRecomputableError
    from mimose.exceptions import NoUnitsError as NoUnitsError
    from mimose.exceptions import OtherRankError as OtherRankError
    from mimose.exceptions import RecomputationError as RecomputationError
    from mimose.exceptions import RehearsalError as RehearsalError
    from mimose.exceptions import StateMismatchError as StateMismatchError
    from mimose.forecast import Forecast as Forecast
    from mimose.global_batch import Balance as Balance
    from mimose.global_batch import balance as balance
    from mimose.loss_by_rows import cross_entropy as cross_entropy
    from mimose.records import StepRecord as StepRecord
    from mimose.records import Summary as Summary
    from mimose.session import Session as Session
    from mimose.session import attach as attach
    from mimose.session import detach as detach
    from mimose.session import session_of as session_of

    __version__: str
else:
    _ERRORS = """
        AdviceError AlreadyAttachedError BudgetError ChangedWeightsError
        CheckpointingConflictError InfeasibleBudgetError LateChangeError MimoseError
        NoUnitsError NotRecomputableError OtherRankError RecomputationError
        RehearsalError StateMismatchError
    """
    _HOME = dict.fromkeys(_ERRORS.split(), "exceptions") | {
        "Balance": "global_batch",
        "BatchSampler": "batch_sampler",
        "BatchStream": "batch_stream",
        "Forecast": "forecast",
        "Rehearsal": "bench.rehearse.command",
        "Session": "session",
        "StepRecord": "records",
        "Summary": "records",
        "advise": "bench.advise.command",
        "attach": "session",
        "balance": "global_batch",
        "cross_entropy": "loss_by_rows",
        "detach": "session",
        "session_of": "session",
        "rehearse": "bench.rehearse.command",
    }
    __all__ = sorted(_HOME)

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, and torch no sooner."""
        import importlib

        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("mimose")
            except metadata.PackageNotFoundError:
                return "a checkout that is not installed"
        if name not in __all__:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        home = importlib.import_module(f"mimose.{_HOME[name]}")
        value = globals()[name] = getattr(home, name)
        return value

    def __dir__() -> list[str]:
        """List the public names."""
        return sorted({*globals(), *__all__})
