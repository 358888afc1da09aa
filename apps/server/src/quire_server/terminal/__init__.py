"""`quire run`, `chat`, `complete`, `list`, `pull`, `rm`, `show` and `collect-env`: Quire for people at a terminal.

`api_client` speaks to any OpenAI-compatible server, `conversation` is what a chat knows, `slash_commands` what can be
said to it, `display` how answers are shown, `chat` the program. Nothing here is part of the server.
"""
