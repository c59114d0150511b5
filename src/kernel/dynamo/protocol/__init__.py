"""The messages: records between processes and the shapes of the HTTP surface. Pure: no socket, no clock, no
environment. Import from the module that defines it: `records`, `openai`."""

__all__: list[str] = []
