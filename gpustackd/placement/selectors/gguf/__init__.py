"""GGUF models: layers on one GPU, on several, partly in RAM, or over workers by RPC."""
