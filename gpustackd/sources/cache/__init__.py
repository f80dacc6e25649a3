"""Caches of what was read: in memory and on disk."""
