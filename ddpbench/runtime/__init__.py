"""How ranks connect, agree and fail."""
