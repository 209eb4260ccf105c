"""``python -m benchmarks.fill``: see `benchmarks.proofs.fill`."""

import sys

from benchmarks.proofs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["fill", "--out", "docs/results/fill", *sys.argv[1:]]))
