"""The ernie4_5_moe network."""
