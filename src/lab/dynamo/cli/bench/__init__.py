"""`dynamo bench URL`: a load generator that costs little, reports its cost, and keeps no sample for ever.

`command` is the command. `load`, `targets` and `samples` are its engine, which `benchmarks/` drives, too.
"""

__all__: list[str] = []
