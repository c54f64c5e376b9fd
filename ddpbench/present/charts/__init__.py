"""The four kinds of chart: what they show (`kinds`) and how each is drawn."""
