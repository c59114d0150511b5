"""`python -m dynamo.common.backend.sample_main`: serve the sample engine."""

from dynamo.common.backend.run import run
from dynamo.common.backend.sample_engine import SampleLLMEngine

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    run(SampleLLMEngine, argv)


if __name__ == "__main__":
    main()
