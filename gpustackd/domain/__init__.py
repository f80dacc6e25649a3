"""The words of the field as values: no IO, no clock, no randomness."""
