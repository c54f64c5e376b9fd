"""The doctor: one folder for each examination, with what it measures, judges and shows."""
