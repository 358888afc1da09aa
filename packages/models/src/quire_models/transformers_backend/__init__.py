"""Networks of Hugging Face Transformers, with the paged attention of Quire."""
