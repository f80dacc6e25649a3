"""What the outside sees of a daemon: HTTP endpoints, systemd, log events and metrics."""
