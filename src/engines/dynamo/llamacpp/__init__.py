"""llama.cpp behind the contract: `python -m dynamo.llamacpp --model model.gguf`. llama.cpp runs in a process of its own."""

__all__: list[str] = []
