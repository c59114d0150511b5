"""How many workers there should be: the load of a model's workers as one number, and the decision that follows."""

__all__: list[str] = []
