"""This host as a worker, and simulated workers: registration, heartbeats, reports on instances."""
