"""Filters narrow the fleet before any fit: each keeps or drops workers, with a code and a cure."""
