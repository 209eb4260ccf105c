"""Runs the command line: ``python -m mimose`` is ``mimose``."""

import sys

from mimose.cli.main import main

sys.exit(main())
