"""The olmo network."""
