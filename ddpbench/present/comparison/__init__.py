"""Documents on comparisons of runs."""
