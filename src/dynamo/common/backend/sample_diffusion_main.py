"""`python -m dynamo.common.backend.sample_diffusion_main`: serve the sample image engine."""

from dynamo.common.backend.run import run
from dynamo.common.backend.sample_diffusion_engine import SampleDiffusionEngine

__all__ = ["main"]


def main(argv: list[str] | None = None) -> None:
    run(SampleDiffusionEngine, argv)


if __name__ == "__main__":
    main()
