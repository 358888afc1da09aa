"""The olmo2 network."""
