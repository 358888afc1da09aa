"""The dots1 network."""
