"""How good a place is: strategy, file locality and preferred labels, as a weighted sum."""
