"""From the facts of a model to what it needs. Pure: no IO, no clock, no randomness."""
