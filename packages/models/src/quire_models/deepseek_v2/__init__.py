"""The deepseek_v2 network."""
