"""Selectors: each looks for a place of one kind, in the order of the engine's ladder."""
