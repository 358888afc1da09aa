"""The gpt2 network."""
