"""Comparing runs: what is slower, faster or the same. No torch."""
