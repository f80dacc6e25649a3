"""YAML and JSON documents: read, checked, written as rows."""
