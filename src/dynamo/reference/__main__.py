"""`python -m dynamo.reference --model DIR`: serve a model with the reference engine."""

from dynamo.common.backend.run import run
from dynamo.reference.engine import ReferenceEngine

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    run(ReferenceEngine, argv)


if __name__ == "__main__":
    main()
