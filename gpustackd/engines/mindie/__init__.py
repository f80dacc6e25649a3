"""MindIE: serving parameters and parallel sizes."""
