"""The verdicts of a watch: pure functions of its history. No torch."""
