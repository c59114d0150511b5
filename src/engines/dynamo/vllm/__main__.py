"""`python -m dynamo.vllm --model DIR`: serve a model with vLLM. Its processes import this module, too: it stays light."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    from dynamo.vllm.engine import VllmEngine
    from dynamo.worker.run import run

    run(VllmEngine, argv)


if __name__ == "__main__":
    main()
