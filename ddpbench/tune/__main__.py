"""The entry point of `python -m ddpbench.tune`, which launchers use."""

import sys

if __name__ == "__main__":
    from ddpbench.cli import main

    sys.exit(main(["tune", *sys.argv[1:]]))
