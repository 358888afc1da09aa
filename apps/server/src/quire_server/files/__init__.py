"""OpenAI's files: uploads streamed to disk, listed, read and deleted by who made them, and named by id in requests."""
