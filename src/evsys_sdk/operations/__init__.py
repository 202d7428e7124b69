"""What a verb and the MCP tool of the same name do: arguments in, a result out that either of them prints.

A result is a typed object; its `plain()` is what `--json` prints and what the tool returns. Nothing here parses a
command line, prints a result or knows a protocol.
"""
