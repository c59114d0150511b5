"""`python -m dynamo.engines.sample.main`: serve the sample engine."""

from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.worker.run import run

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    run(SampleLLMEngine, argv)


if __name__ == "__main__":
    main()
