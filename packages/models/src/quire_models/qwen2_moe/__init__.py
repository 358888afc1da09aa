"""The qwen2_moe network."""
