"""`dynamo size`: how many replicas meet a target, by simulation in virtual time.

`profile` is the engine, `demand` the load, `measure` fills a profile from a live server, `trial` simulates one layout,
`search` chooses the layouts, `options` and `command` are the command line.
"""

__all__: list[str] = []
