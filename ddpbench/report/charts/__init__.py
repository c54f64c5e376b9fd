"""Charts that sections share, or that are too long for the module of their section."""
