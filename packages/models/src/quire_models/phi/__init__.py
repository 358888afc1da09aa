"""The phi network."""
