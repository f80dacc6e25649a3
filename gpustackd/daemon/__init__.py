"""Wiring and loops: everything that waits, signals and stops."""
