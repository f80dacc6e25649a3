"""Example fleet and models, and the writer of model directories that need no disk."""
