"""OpenAI's batches: files of requests that run beside interactive ones, each line answered exactly once."""
