"""Run a user's script or module as if nothing watched it."""
