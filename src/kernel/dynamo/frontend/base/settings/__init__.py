"""The settings of the parts, one record for each: a part that is taken away leaves its record, so that flags stay known."""

__all__: list[str] = []
