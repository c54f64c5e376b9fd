"""The manual: Markdown, one chapter per file."""
