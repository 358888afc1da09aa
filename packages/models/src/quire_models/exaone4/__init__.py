"""The exaone4 network."""
