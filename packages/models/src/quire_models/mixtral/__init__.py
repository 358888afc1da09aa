"""The mixtral network."""
