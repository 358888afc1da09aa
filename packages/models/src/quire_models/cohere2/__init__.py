"""The cohere2 network."""
