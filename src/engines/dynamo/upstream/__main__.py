"""`python -m dynamo.upstream --upstream https://host/v1 --model NAME=THEIR-NAME`: another server's models as a worker."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    from dynamo.upstream import UpstreamEngine
    from dynamo.worker.run import run

    run(UpstreamEngine, argv)


if __name__ == "__main__":
    main()
