"""Every rule of the tables, recomputed."""
