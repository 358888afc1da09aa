"""The glm network."""
