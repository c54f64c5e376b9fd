"""Plots of a run in a terminal."""
