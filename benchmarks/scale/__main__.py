"""``python -m benchmarks.scale``: see `benchmarks.proofs.scale`."""

import sys

from benchmarks.proofs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["scale", *sys.argv[1:]]))
