"""Keys of clients, their limits and budgets: records, rules and arithmetic. Pure: no file, clock, socket or lock."""

__all__: list[str] = []
