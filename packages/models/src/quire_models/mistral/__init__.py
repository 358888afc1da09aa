"""The mistral network."""
