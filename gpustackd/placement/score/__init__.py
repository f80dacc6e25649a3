"""How good a place is: placement (by strategy) + file locality + preferred labels, as a weighted sum."""
