"""The olmo3 network."""
