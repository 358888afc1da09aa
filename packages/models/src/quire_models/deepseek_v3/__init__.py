"""The deepseek_v3 network."""
