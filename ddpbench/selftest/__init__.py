"""Faults planted on purpose in real ranks, to see that they are found. No torch."""
