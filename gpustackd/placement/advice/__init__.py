"""What would have to change for a waiting instance to fit: tried, ranked, worded."""
