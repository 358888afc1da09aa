"""The ministral network."""
