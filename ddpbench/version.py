"""The version of ddpbench, below all else: what users find in `ddpbench` imports nearly all."""

VERSION = "0.1.0"
