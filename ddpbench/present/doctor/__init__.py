"""Documents on examinations."""
