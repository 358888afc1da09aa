"""The starcoder2 network."""
