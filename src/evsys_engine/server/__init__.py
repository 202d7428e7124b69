"""The engine as a server that speaks the Tinker protocol over HTTP.

In: anything that fulfils `evsys_engine.types.EngineApi`. Out: an address that the `tinker` client (0.25 and newer)
and code written for it train on. `serve` runs until a signal; `background_server` runs beside the caller.
"""

from __future__ import annotations

from evsys_engine.server.limits import ServerLimits
from evsys_engine.server.run import RunningServer, ServerAddress, background_server, serve

__all__ = ["ServerAddress", "ServerLimits", "RunningServer", "background_server", "serve"]
