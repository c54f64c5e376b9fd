"""The version of ddpbench, in the lowest layer: `ddpbench` itself imports nearly all modules."""

VERSION = "0.1.0"
