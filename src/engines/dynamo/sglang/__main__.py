"""`python -m dynamo.sglang --model-path DIR`: serve a model with SGLang. Its processes import this module, too: it stays light."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    from dynamo.sglang.engine import SglangEngine
    from dynamo.worker.run import run

    run(SglangEngine, argv)


if __name__ == "__main__":
    main()
