"""`python -m dynamo.trtllm --model DIR`: serve a model with TensorRT-LLM. Its processes import this module, too: it stays light."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    from dynamo.trtllm.engine import TrtllmEngine
    from dynamo.worker.run import run

    run(TrtllmEngine, argv)


if __name__ == "__main__":
    main()
