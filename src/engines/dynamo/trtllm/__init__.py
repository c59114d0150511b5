"""TensorRT-LLM behind the contract: `python -m dynamo.trtllm --model DIR`. Written from its API; not yet run on hardware."""

__all__: list[str] = []
