"""The demonstration: example fleet and models, daemons as real processes, and a narrator."""
