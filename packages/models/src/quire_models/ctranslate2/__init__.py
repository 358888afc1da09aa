"""Checkpoints in the format of CTranslate2, as faster-whisper has them: a `model.bin` beside a short config.json."""
