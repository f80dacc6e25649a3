"""Typed readers of model files: config.json, safetensors and GGUF headers."""
