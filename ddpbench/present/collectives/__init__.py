"""Documents on runs of collectives."""
