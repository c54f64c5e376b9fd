"""Other tools' logs as runs: one entry of sources.READERS adds a tool. No torch."""
