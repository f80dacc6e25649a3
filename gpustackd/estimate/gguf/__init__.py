"""What llama.cpp allocates for a GGUF model, from its header and flags: weights, cache, compute buffers."""
