"""Documents on runs of training steps."""
