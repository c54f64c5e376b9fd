"""What a rank sees of itself: phases, collectives, links, pauses."""
