"""GPUs that the user picked by hand."""
