"""`dynamo bench replay`: traces over simulated workers in virtual time, router modes and policies side by side.

The replay itself is the room `dynamo.replay`. Here are the command line, the processes that share the work, and the report.
"""

__all__: list[str] = []
