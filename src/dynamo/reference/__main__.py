"""`python -m dynamo.reference --model DIR`: serve a model with the reference engine."""

from dynamo.reference.engine import ReferenceEngine
from dynamo.worker.run import run

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    run(ReferenceEngine, argv)


if __name__ == "__main__":
    main()
