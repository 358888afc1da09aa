"""The qwen3 network."""
