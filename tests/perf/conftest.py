"""The plugin, where ddpbench is not installed."""

pytest_plugins = ["ddpbench.pytest_plugin"]
