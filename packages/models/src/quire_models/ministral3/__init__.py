"""The ministral3 network."""
