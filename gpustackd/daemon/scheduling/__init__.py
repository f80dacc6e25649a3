"""From a wake-up to a committed placement: intake, analysis, decisions, commits."""
