"""The llama network."""
