"""`python -m dynamo.reference --model DIR`: serve a model with the reference engine."""

from dynamo.common.snapshot import run_with_snapshot
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import LLMEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.reference.encoder import ReferenceEncoder
from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.flags import read_arguments


async def engine_of_role(argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
    """Return the engine of the role that the command line names, and the worker's configuration."""
    args, _, _ = read_arguments(argv, may_encode=True)
    is_encoder = args.disaggregation_mode is DisaggregationMode.ENCODE
    return await (ReferenceEncoder if is_encoder else ReferenceEngine).from_args(argv)


def main(argv: list[str] | None = None) -> None:
    run_with_snapshot(ReferenceEngine, argv, engine_of_role)


if __name__ == "__main__":
    main()
