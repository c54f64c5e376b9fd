"""The entry point of `python -m ddpbench.watch SCRIPT`, which launchers use in every rank."""

import sys

if __name__ == "__main__":
    from ddpbench.watch import entry

    entry.main(sys.argv[1:])
