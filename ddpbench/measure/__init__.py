"""Measure operations and training steps in every rank."""
