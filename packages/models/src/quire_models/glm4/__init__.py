"""The glm4 network."""
