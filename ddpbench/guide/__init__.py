"""The manual: Markdown, one chapter per file, and the command that shows it."""
