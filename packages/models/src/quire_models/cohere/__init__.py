"""The cohere network."""
