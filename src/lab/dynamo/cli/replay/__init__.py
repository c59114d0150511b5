"""`dynamo replay`: recorded requests are sent again, or answered from their recording."""

__all__: list[str] = []
