"""What is true of llama.cpp: the flags of its server, and how it divides layers over devices."""
