"""Who is to blame for a hang: what each rank says of itself, and one verdict for all."""
