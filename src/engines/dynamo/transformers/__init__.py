"""Hugging Face's `transformers` behind the contract: `python -m dynamo.transformers --model DIR`, any model it generates with."""

__all__: list[str] = []
