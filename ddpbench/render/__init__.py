"""From a run to text: one function a format. No torch."""
