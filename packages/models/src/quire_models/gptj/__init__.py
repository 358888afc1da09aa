"""The gptj network."""
