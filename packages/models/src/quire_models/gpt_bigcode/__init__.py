"""The gpt_bigcode network."""
