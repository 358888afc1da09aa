"""The engine, live: its steps, rows, blocks and requests as events, and why a request took as long as it did."""

from quire_server.engine_view.service import EngineView

__all__ = ["EngineView"]
