"""How ranks start, meet, agree and fail."""
