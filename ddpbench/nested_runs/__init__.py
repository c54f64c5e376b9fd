"""Run ddpbench command lines from ddpbench: check them, measure one, or measure two in turns."""
