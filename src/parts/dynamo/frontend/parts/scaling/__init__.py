"""What autoscalers read: how full the workers of each model and role are, and how many there should be (`--autoscale`)."""

__all__: list[str] = []
