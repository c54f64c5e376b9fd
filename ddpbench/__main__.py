"""python -m ddpbench"""

import sys

try:
    from ddpbench.cli import main
except ModuleNotFoundError as error:
    sys.exit(
        f"ddpbench: {error.name} is not installed for {sys.executable}: activate the environment "
        "that has it (source .venv/bin/activate), or type ./run_bench.sh instead of ddpbench"
    )

sys.exit(main())
