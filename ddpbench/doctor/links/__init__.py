"""Links: what each pair of ranks or hosts can send, and which link or host is slow."""
