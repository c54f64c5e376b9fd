"""Read other tools' logs as runs. To add a tool, add an entry to sources.READERS. No torch."""
