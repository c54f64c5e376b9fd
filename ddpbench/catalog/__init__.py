"""Tables of what can be measured. To add an item, add one entry to one table."""
