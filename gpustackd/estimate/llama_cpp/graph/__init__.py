"""A forward pass of llama.cpp as a graph: what each network computes, on which device, in how much memory."""
