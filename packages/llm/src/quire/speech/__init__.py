"""Transcribing with a served model: recordings as requests, and their answers as segments."""
