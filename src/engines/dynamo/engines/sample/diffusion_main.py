"""`python -m dynamo.engines.sample.diffusion_main`: serve the sample image engine."""

from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.worker.run import run

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    run(SampleDiffusionEngine, argv)


if __name__ == "__main__":
    main()
