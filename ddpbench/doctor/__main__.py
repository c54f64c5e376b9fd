"""The entry point of `python -m ddpbench.doctor`, which launchers use."""

import sys

if __name__ == "__main__":
    from ddpbench.cli import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
