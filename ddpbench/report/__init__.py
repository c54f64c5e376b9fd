"""A run as a page: charts, each with its table, in one HTML file that needs no network."""
