"""What is stored: the schema and the results folder. No torch."""
