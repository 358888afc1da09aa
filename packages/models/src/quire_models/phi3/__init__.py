"""The phi3 network."""
