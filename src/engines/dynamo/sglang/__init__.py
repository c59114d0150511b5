"""SGLang behind the contract: `python -m dynamo.sglang --model-path DIR`. Nothing here imports `sglang` before it is needed."""

__all__: list[str] = []
