"""`evsys mcp`: the verbs as tools for coding agents, over the Model Context Protocol (extra `mcp`)."""
