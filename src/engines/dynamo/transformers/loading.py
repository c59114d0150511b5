"""Brings the model up: weights, device, and for answers transformers' continuous batching with our sampler. Blocks: for a thread."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.settings.foreign import OPENMP_THREADS
from dynamo.transformers.arguments import CACHE_MB, TransformersArguments
from dynamo.transformers.row_sampling import ARGUMENT, RowSampler, RowSampling

logger = logging.getLogger(__name__)

UNKNOWN_CONTEXT: Final = 4096  # tokens, where the model's configuration has none
BATCHING_LOG: Final = "ContinuousBatchingLogger"
BATCHING_SECONDS: Final = 120.0  # for the thread that generates to allocate its cache


@dataclass(frozen=True, slots=True)
class LoadedTransformers:
    """A model that generates."""

    manager: Any  # transformers' `ContinuousBatchingManager`, running
    context_length: int  # tokens of prompt and answer: the model's, or what the cache holds
    vocab_size: int
    block_size: int
    blocks: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A model that makes vectors."""

    states: Callable[[Sequence[Sequence[int]]], Any]
    """Computes the states of the last layer for several inputs: a float32 tensor on the CPU, of (input, position, value). A
    shorter input is filled up behind. Blocks, and is not safe from several threads."""
    context_length: int
    vocab_size: int
    hidden_size: int
    generates: bool  # made to generate: what it knows of a text is in its last token


def load_encoder(arguments: TransformersArguments, directory: Path) -> LoadedEncoder:
    """Load a model without its head. Raises InvalidArgument for one that transformers cannot read."""
    import torch

    import transformers

    began = time.perf_counter()
    model, device = _load_model(transformers.AutoModel, arguments, directory)
    model.eval()
    config = model.config.get_text_config()

    def states(inputs: Sequence[Sequence[int]]) -> Any:
        longest = max(map(len, inputs))
        ids = torch.zeros((len(inputs), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            found = model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
            return found.float().cpu()

    logger.info(
        "transformers %s has loaded the model in %.1f s, for vectors: %s, %s",
        transformers.__version__, time.perf_counter() - began, device, model.dtype,
    )  # fmt: skip
    trained = _positions(config)
    return LoadedEncoder(
        states,
        min(arguments.context_length or trained, trained),
        int(config.vocab_size),
        int(config.hidden_size),
        any("ForCausalLM" in name for name in model.config.architectures or ()),
    )


def _positions(config: Any) -> int:
    """Return how long an input may be. Models in the manner of RoBERTa count positions from behind their padding's number."""
    trained = int(getattr(config, "max_position_embeddings", None) or UNKNOWN_CONTEXT)
    is_shifted = any(name in str(config.model_type) for name in ("roberta", "mpnet", "camembert"))
    return trained - int(config.pad_token_id or 0) - 1 if is_shifted else trained


def load_transformers(arguments: TransformersArguments, directory: Path) -> LoadedTransformers:
    """Load a model and start its generating thread.

    Raises InvalidArgument for a model that transformers cannot read, EngineShutdown where generation does not start.
    """
    import transformers

    began = time.perf_counter()
    model, device = _load_model(transformers.AutoModelForCausalLM, arguments, directory)
    config = model.config.get_text_config()
    try:
        manager = _start_batching(model, arguments, config, device)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise EngineShutdown(
            f"the continuous batching of transformers {transformers.__version__} does not start with this model: {error}"
        ) from error
    cache = manager.batch_processor.cache
    trained = getattr(config, "max_position_embeddings", None) or UNKNOWN_CONTEXT
    block_size = int(manager.continuous_batching_config.page_size)
    context = min(arguments.context_length or trained, int(cache.num_blocks) * block_size)
    logger.info(
        "transformers %s has loaded the model in %.1f s: %s, %s, %d KV blocks of %d tokens",
        transformers.__version__, time.perf_counter() - began, device, model.dtype, cache.num_blocks, block_size,
    )  # fmt: skip
    return LoadedTransformers(
        manager, context, int(config.vocab_size), block_size, int(cache.num_blocks), _eos_of(directory, config)
    )


def _load_model(kind: Any, arguments: TransformersArguments, directory: Path) -> tuple[Any, str]:
    """Return a model and the device that it is on. `kind`: transformers' class that chooses the model's own."""
    import torch

    import transformers

    device = _device(arguments.device)
    if device == "cpu" and OPENMP_THREADS.value(os.environ) is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # one core is left for the worker's own loop
    dtype = arguments.dtype or ("float32" if device == "cpu" else "auto")
    try:
        model = kind.from_pretrained(
            directory,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=arguments.trust_remote_code,
            local_files_only=True,
        ).to(device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        line = str(error).strip().split("\n", 1)[0]
        raise InvalidArgument(f"transformers {transformers.__version__} cannot load {directory}: {line}") from error
    return model, device


def _start_batching(model: Any, arguments: TransformersArguments, config: Any, device: str) -> Any:
    import torch

    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    torch.set_grad_enabled(False)
    # The worker sets how many blocks there are: what transformers cannot find out about the memory is no error.
    logging.getLogger(BATCHING_LOG).addFilter(lambda record: "psutil" not in record.getMessage())
    # Our sampler runs Python for each row: no graphs, and no step ahead of the tokens that it draws.
    batching = ContinuousBatchingConfig(
        page_size=arguments.block_size,
        num_blocks=_blocks(arguments, config, model.dtype, device),
        max_batch_tokens=arguments.max_num_batched_tokens,
        max_requests_per_batch=arguments.max_num_seqs,
        use_async_batching=False,
        use_cuda_graph=False,
        per_request_processors=True,
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
        continuous_batching_config=batching,
    )
    ContinuousBatchingLogitsProcessor.register(RowSampler)
    processors = manager.logit_processor
    processors.logits_processor.append(RowSampler())
    processors.tensors_required += 1
    processors.do_processing = True
    processors.supported_keys[ARGUMENT] = RowSampling
    manager.start()
    until = time.monotonic() + BATCHING_SECONDS
    while manager.batch_processor is None:
        if not manager.is_running() or time.monotonic() > until:
            raise EngineShutdown(f"transformers does not generate: {manager.background_thread_status.fatal_error}")
        time.sleep(0.01)
    return manager


def _device(asked: str) -> str:
    import torch

    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _blocks(arguments: TransformersArguments, config: Any, dtype: Any, device: str) -> int | None:
    """Return how many KV blocks to make; None: as many as fit into a GPU's free memory."""
    if arguments.kv_cache_mb is None and device.startswith("cuda"):
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes: int = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    return max(2, (arguments.kv_cache_mb or CACHE_MB) * 2**20 // (token_bytes * arguments.block_size))


def _eos_of(directory: Path, config: Any) -> tuple[int, ...]:
    """Return the model's end tokens: those of `generation_config.json`, which lists every one, else the configuration's."""
    found: Any = None
    path = directory / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_bytes()).get("eos_token_id")
    found = getattr(config, "eos_token_id", None) if found is None else found
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)
