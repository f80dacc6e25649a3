"""Why there is no place, in words and codes."""
