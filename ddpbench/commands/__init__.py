"""Commands on stored runs, and commands that start others. Their options import no torch."""
