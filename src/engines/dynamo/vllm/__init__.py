"""vLLM behind the contract: `python -m dynamo.vllm --model DIR`. Nothing here imports the package `vllm` before it is needed."""

__all__: list[str] = []
