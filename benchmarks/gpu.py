"""``python -m benchmarks.gpu``: see `benchmarks.proofs.gpu`."""

import sys

from benchmarks.proofs.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["gpu", *sys.argv[1:]]))
