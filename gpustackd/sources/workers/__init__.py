"""Model files on workers, through their file API."""
