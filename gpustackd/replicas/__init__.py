"""How many instances a model has, which one goes when there are too many, when the number changes: pure."""
