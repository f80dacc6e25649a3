"""What would have to change for a waiting instance to fit: sought, decided with, ranked. Pure."""
