"""``python -m benchmarks.fill``: see `benchmarks.proofs.fill`."""

import sys
from pathlib import Path

from benchmarks.proofs.__main__ import main

if __name__ == "__main__":
    out = ("--out", str(Path("docs/results/fill")))
    sys.exit(main(["fill", *out, *sys.argv[1:]]))
