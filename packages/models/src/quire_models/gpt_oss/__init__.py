"""The gpt_oss network."""
