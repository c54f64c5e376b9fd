"""Find the settings that make a DDP step fastest."""
