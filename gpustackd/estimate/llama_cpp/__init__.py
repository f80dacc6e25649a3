"""What llama.cpp allocates for a GGUF model: weights, cache and compute buffers."""
