"""What was read stays at hand: in memory and on disk."""
