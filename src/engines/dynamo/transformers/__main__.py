"""`python -m dynamo.transformers --model DIR`: serve a model with transformers' continuous batching."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    from dynamo.transformers.engine import TransformersEngine
    from dynamo.worker.run import run

    run(TransformersEngine, argv)


if __name__ == "__main__":
    main()
