"""The flex_olmo network."""
