"""Capabilities: every operation, reduce operation and dtype, tried on the backend and checked."""
