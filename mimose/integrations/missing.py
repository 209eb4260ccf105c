"""Which package an import failed for."""

from __future__ import annotations


def missing_package(error: ImportError) -> str | None:
    """Return the package that is not installed; None where it is something else.

    transformers imports lazily: what it raises then names a class, and the package
    that was missing is named by what that was raised from.

    Args:
        error: What the import raised.
    """
    found: BaseException | None = error
    missing = None
    while found is not None:
        if isinstance(found, ModuleNotFoundError) and found.name:
            missing = found.name.partition(".")[0]
        found = found.__cause__ or found.__context__
    return missing
