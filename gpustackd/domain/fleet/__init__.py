"""The fleet as arrays: workers, GPUs, and what is booked on them."""
