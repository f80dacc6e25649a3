"""Model hubs over HTTP: listings, file sizes and headers."""
