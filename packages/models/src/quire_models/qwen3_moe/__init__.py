"""The qwen3_moe network."""
