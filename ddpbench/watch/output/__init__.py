"""What rank 0 gives out: line, table, stored run, metrics, callback."""
