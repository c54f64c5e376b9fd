"""The sections of a page: one module each, with a function `section(runs)`."""
