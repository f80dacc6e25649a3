"""Whole GPUs or shares of them, on one worker or on several (vLLM, SGLang, custom)."""
