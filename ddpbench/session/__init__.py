"""A measuring command from start to end: options, launches, the record of a run."""
