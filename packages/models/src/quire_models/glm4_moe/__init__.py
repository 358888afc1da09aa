"""The glm4_moe network."""
