"""The bert network."""
