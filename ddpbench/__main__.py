"""The entry point of `python -m ddpbench`."""

import sys

from ddpbench.cli import main

sys.exit(main())
