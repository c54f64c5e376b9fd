"""Compare runs: which cases are slower, faster or the same. No torch."""
