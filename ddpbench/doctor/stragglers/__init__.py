"""Stragglers: how fast each rank computes and copies, which rank is slow, and why."""
