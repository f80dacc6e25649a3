"""The instance queue: every waiting instance once, in the lane that says what it waits for."""
