"""Speech: OpenAI's routes below `/v1/audio`."""
