"""How many instances a model has, which one goes, and what to do about one that failed: pure."""
