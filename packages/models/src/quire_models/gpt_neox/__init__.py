"""The gpt_neox network."""
