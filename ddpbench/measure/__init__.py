"""THE measurement, in every rank."""
