"""Checkpoints in the format of their makers at Mistral AI: params.json beside consolidated.safetensors."""
