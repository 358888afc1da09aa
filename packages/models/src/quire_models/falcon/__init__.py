"""The falcon network."""
