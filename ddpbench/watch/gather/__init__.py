"""The way of the ranks' reports to rank 0, and how they are joined there."""
