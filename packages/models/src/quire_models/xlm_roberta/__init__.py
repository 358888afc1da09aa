"""The xlm_roberta network."""
