"""Runs as documents: what a command shows, as text, CSV, JSON, Markdown, a page and pictures."""
