"""Commands on stored runs, and commands that start others. No torch."""
