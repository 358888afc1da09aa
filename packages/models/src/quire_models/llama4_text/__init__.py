"""The llama4_text network."""
