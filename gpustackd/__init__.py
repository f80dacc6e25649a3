"""gpustackd decides on which workers and GPUs the instances of AI models run."""

__version__ = "0.1.0"
