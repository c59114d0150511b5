"""`python -m dynamo.llamacpp --model model.gguf`: serve a GGUF file with llama.cpp."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    from dynamo.llamacpp.arguments import choose_engine
    from dynamo.worker.run import run

    run(choose_engine(argv), argv)


if __name__ == "__main__":
    main()
