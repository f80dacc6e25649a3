"""What is true of one engine: its flags, parallel sizes, memory share and limits, each read once."""
