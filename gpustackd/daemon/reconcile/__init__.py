"""Loops that bring rows back in line: replicas, worker health, failed instances, leases."""
