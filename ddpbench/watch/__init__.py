"""Explain any training job while it runs: phases, collectives, stragglers, links, replicas."""
