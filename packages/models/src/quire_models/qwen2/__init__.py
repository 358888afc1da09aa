"""The qwen2 network."""
