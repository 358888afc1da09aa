"""The seed_oss network."""
