"""Model directories on this host."""
