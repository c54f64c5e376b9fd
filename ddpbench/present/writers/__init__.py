"""Documents as a page, as pictures, and as Markdown."""
