"""The gemma3_text network."""
