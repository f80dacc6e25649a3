"""What a daemon shows of itself: log lines and metrics."""
