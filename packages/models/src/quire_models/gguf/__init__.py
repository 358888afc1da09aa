"""GGUF files: one file with configuration, tokenizer and weights, opened as the folder that it stands for."""
