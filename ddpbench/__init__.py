"""ddpbench: what PyTorch's collectives and a DDP step cost, and which rank or link is to blame."""

__version__ = "0.1.0"
