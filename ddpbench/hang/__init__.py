"""Find the rank that causes a hang: each rank reports its status, and one rank explains all."""
