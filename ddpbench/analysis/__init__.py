"""Pure functions from samples to figures and findings: no torch, no I/O."""
