"""Files and batches: a directory that keeps them, and the runner that executes batches through the calls of the APIs."""

__all__: list[str] = []
