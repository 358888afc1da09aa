"""The opt network."""
