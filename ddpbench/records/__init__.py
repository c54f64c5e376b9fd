"""The schema of stored runs, and the results folder. No torch."""
