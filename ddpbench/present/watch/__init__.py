"""Documents on watched jobs."""
