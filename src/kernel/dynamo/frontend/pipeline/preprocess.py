"""From a validated request to work: render, tokenise, check the length, fill in the worker's fields."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Final

import msgspec
import msgspec.structs

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.stage_timer import PARSE, QUEUE, TEMPLATE, TOKENISE, StageTimer
from dynamo.frontend.models.model_limits import PromptTooLong, check_ranks, check_token_ids
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.parsing import OutputPlan, plan_output, tell_worker, think_marks
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.settings import PipelineSettings
from dynamo.frontend.pipeline.text_generation import text_plan, text_prompts
from dynamo.protocol.guided_limits import find_excess
from dynamo.protocol.openai.chat_options import ChatOptions, chat_options
from dynamo.protocol.openai.closed_schema import bounded_guidance
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    input_trigger,
    raw_prompt,
    template_messages,
    template_tools,
    to_worker_fields,
)
from dynamo.protocol.openai.validation import check_prompt_scores, most_scored_tokens
from dynamo.protocol.worker_request import PlannedRequest
from dynamo.router.dispatch.failover import DispatchLimits, pinned_instance
from dynamo.runtime.observe.metrics import observe_each
from dynamo.text.contents import are_plain
from dynamo.text.control_tokens import Guarded, RenderedPrompt
from dynamo.text.templates import INLINE_BUDGET, BudgetExceeded, BudgetSpec
from dynamo.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS: Final = 1 << 20  # of a model that does not report how many it takes
CHARACTERS_PER_TOKEN: Final = 4  # a text of more of them for each token of the limit is probed before it is tokenised
PROBED_CHARACTERS: Final = 64 * 1024  # that are tokenised at once while a prompt is probed
TOKENS_PER_CUT: Final = 64
QUICK_TIMES: Final = 8  # as long a text is tokenised on the loop where the tokenizer is quick
_QUERY: Final = "query_instance_id:"


class Preprocessor:
    """Shared by the routes; keeps no state of a request."""

    def __init__(self, settings: PipelineSettings, metrics: FrontendMetrics, offload: Offload) -> None:
        self._settings, self._metrics, self._offload = settings, metrics, offload

    @property
    def offload(self) -> Offload:
        """Where long work of a request goes."""
        return self._offload

    @property
    def settings(self) -> PipelineSettings:
        return self._settings

    async def chat(
        self, request: ChatRequest, effects: HeaderEffects, model: ServedModel, overhead: StageTimer
    ) -> tuple[Plan, str | None]:
        """Return the plan, and the text that was tokenised (None when the client sent ids).

        Raises `InvalidArgument` when the template refuses, `RequestRejected` when the prompt is too long.
        """
        runtime_data = model.card.runtime_config.runtime_data
        options = chat_options(request, default_thinking_mode=runtime_data.get("default_thinking_mode"))
        if model.takes_text:
            text_only = text_plan(request, self.plan(request, effects, model, [[]], options))
            return msgspec.structs.replace(text_only, parsing=self._parsing(options, model, text_only, "")), None
        began = perf_counter()
        text: str | None = None
        limits, ids = model.length_limits, request.token_data
        if ids is None:
            prompt = await self._prompt(request, options, model, overhead)
            text = prompt.text
            context = limits.context if request.truncate_prompt_tokens is None else None
            ids = await self._encode(model, prompt, overhead, context, is_chat=True)
            if request.add_special_tokens is True:
                ids = model.text.text_frame.around_rendered(ids)
        if request.truncate_prompt_tokens is not None:
            ids = limits.cut(ids, request.truncate_prompt_tokens, request.output_limit)
        limits.check([ids], is_chat=True)
        if request.is_large:  # which is scanned
            plan = await self._offload(partial(self.plan, request, effects, model, [ids], options))
        else:
            plan = self.plan(request, effects, model, [ids], options)
        wants_scores = request.logprobs or request.prompt_logprobs is not None
        if (wants_scores and _limits_scores(plan)) or request.clamps_output:
            limits.clamp(plan.fields.stop_conditions, len(ids))
        elif limits.combined is not None:
            limits.fill_in(plan.fields.stop_conditions, plan.prompts, is_chat=True)
        if (parsing := self._parsing(options, model, plan, text)) is not None:
            plan = plan.reading(parsing)
        self._metrics.requests.stages.preprocess_seconds.observe(perf_counter() - began)
        return plan, text

    async def count_chat(self, request: ChatRequest, model: ServedModel, overhead: StageTimer) -> int:
        """Return how many tokens the prompt of a chat has; raises what `chat_tokens` raises."""
        return len(await self.chat_tokens(request, model, overhead))

    async def chat_tokens(self, request: ChatRequest, model: ServedModel, overhead: StageTimer) -> list[int]:
        """Return the tokens of the prompt of a chat, also of one that is too long for the model.

        Raises `InvalidArgument` when the template refuses, `RequestRejected` (422) for a model that takes text.
        """
        check_has_tokens(request.model, model)
        if request.token_data is not None:
            return request.token_data
        runtime_data = model.card.runtime_config.runtime_data
        options = chat_options(request, default_thinking_mode=runtime_data.get("default_thinking_mode"))
        prompt = await self._prompt(request, options, model, overhead)
        ids = await self._encode(model, prompt, overhead, None, is_chat=True)
        return model.text.text_frame.around_rendered(ids) if request.add_special_tokens is True else ids

    async def text_tokens(self, request: ChatRequest, text: str, model: ServedModel, overhead: StageTimer) -> list[int]:
        """Return the tokens of a text as `completion` sends them, also of one that is too long for the model.

        Raises `RequestRejected` (422) for a model that takes text.
        """
        check_has_tokens(request.model, model)
        ids = await self._encode(model, RenderedPrompt(text), overhead, None, is_chat=False)
        return ids if request.add_special_tokens is False else model.text.text_frame.around(ids)

    async def _prompt(
        self, request: ChatRequest, options: ChatOptions, model: ServedModel, overhead: StageTimer
    ) -> RenderedPrompt:
        """Render here where that is quick, else in the executor: a template may be any program."""
        if request.nvext is not None and (text := raw_prompt(request)) is not None:
            return RenderedPrompt(text)
        overhead.mark(PARSE)
        template, prompt = model.text.template, None
        if not request.is_large and template.expect_cheap():
            try:
                prompt = self._render(request, options, model, INLINE_BUDGET)
            except BudgetExceeded:
                template.was_costly()
        if prompt is None:
            prompt = await self._offload(lambda: self._render(request, options, model))
        overhead.mark(TEMPLATE)
        return prompt

    async def completion(
        self, request: CompletionRequest, effects: HeaderEffects, model: ServedModel, overhead: StageTimer
    ) -> tuple[Plan, str | None]:
        """Prepare a batch of prompts as `chat` does, without a template; the text is that of a single prompt."""
        is_unbound = request.max_tokens is None and self._settings.completions_max_tokens > 0
        if is_unbound:
            request.max_tokens = max(self._settings.completions_max_tokens, request.min_tokens or 0)
        if model.takes_text:
            empty: list[list[int]] = [[] for _ in text_prompts(request)]
            return text_plan(request, self.plan(request, effects, model, empty)), None
        began = perf_counter()
        sources = request.prompts()
        prompts = [
            await self._text_ids(request, prompt, model, overhead) if isinstance(prompt, str) else prompt
            for prompt in sources
        ]
        limits = model.length_limits
        if request.truncate_prompt_tokens is not None:
            prompts = [limits.cut(ids, request.truncate_prompt_tokens, request.max_tokens) for ids in prompts]
        limits.check(prompts, is_chat=False)
        if request.is_large:
            plan = await self._offload(partial(self.plan, request, effects, model, prompts))
        else:
            plan = self.plan(request, effects, model, prompts)
        if _limits_scores(plan) or is_unbound:
            limits.clamp(plan.fields.stop_conditions, max(map(len, plan.prompts)))
        if limits.combined is not None:
            limits.fill_in(plan.fields.stop_conditions, plan.prompts, is_chat=False)
        self._metrics.requests.stages.preprocess_seconds.observe(perf_counter() - began)
        only = sources[0] if len(sources) == 1 else None
        return plan, only if isinstance(only, str) else None

    async def _text_ids(
        self, request: CompletionRequest, text: str, model: ServedModel, overhead: StageTimer
    ) -> list[int]:
        """Tokenise one text prompt, with the tokens that the tokenizer's post-processor adds unless the client declines."""
        context = model.length_limits.context if request.truncate_prompt_tokens is None else None
        ids = await self._encode(model, RenderedPrompt(text), overhead, context, is_chat=False)
        return ids if request.add_special_tokens is False else model.text.text_frame.around(ids)

    def _parsing(self, options: ChatOptions, model: ServedModel, plan: Plan, prompt: str | None) -> OutputPlan | None:
        """Choose the parsers of the answer, and write what follows from them into the worker's request."""
        config = model.card.runtime_config
        chooses_calls = model.takes_text and options.only_first_call  # from those that the engine has read
        if (
            config.tool_call_parser is None
            and config.reasoning_parser is None
            and options.forced_choice is None
            and options.shape is None
            and not chooses_calls
        ):
            return None
        tokenizer = model.text.tokenizer
        parsing = plan_output(
            options,
            config,
            prompt=prompt,
            tokenizer=tokenizer,
            prompt_ids=plan.prompts[0],
            chooses_calls=chooses_calls,
        )
        if parsing is not None and not model.takes_text:
            closes = not self._settings.open_guided_objects
            parsing = tell_worker(options, config, parsing, tokenizer, plan.fields, closes_objects=closes)
            self._check_guided(plan.fields)
        return parsing

    def _render(
        self, request: ChatRequest, options: ChatOptions, model: ServedModel, budget: BudgetSpec | None = None
    ) -> RenderedPrompt:
        if not model.text.can_chat:
            raise RequestRejected(
                400,
                f"The model '{request.model}' has no chat template, so messages cannot be made a prompt. Send a prompt "
                "to the completions route, or have its worker started with --custom-jinja-template FILE (or this "
                "frontend with DYN_CUSTOM_JINJA_TEMPLATE=FILE)",
                param="messages",
            )
        began = perf_counter()
        variables = dict(options.template_variables)
        if request.response_format is not None:
            variables["response_format"] = msgspec.to_builtins(request.response_format)
        if request.tool_choice is not None and request.tool_choice != "auto":
            variables["tool_choice"] = msgspec.to_builtins(request.tool_choice)
        config = model.card.runtime_config
        excludes = self._settings.exclude_tools_when_tool_choice_none and config.exclude_tools_when_tool_choice_none
        tools = template_tools(request, exclude_when_none=excludes)
        messages, marks = request.messages, None
        if not are_plain(messages):
            form = model.text.template.argument_form(has_tools=bool(tools))
            messages = template_messages(
                request,
                as_objects=form.as_objects or config.tool_call_arguments_format == "json_object",
                takes_raw_text=form.takes_raw_text,
            )
            marks = think_marks(config, model.text.tokenizer)
        guarded: Guarded | None = None
        if model.text.control_tokens is not None and not self._settings.allow_control_tokens_in_text:
            guarded = model.text.control_tokens.guard(messages, tools, variables)
        text = model.text.template.render(
            messages if guarded is None else guarded.messages,
            tools=tools if guarded is None else guarded.tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=request.continue_final_message is True,
            think_marks=marks,
            variables=variables if guarded is None else guarded.variables,
            budget=budget,
        )
        prompt = RenderedPrompt(text) if guarded is None else guarded.restore(text)
        self._metrics.preparation.template_seconds.observe(perf_counter() - began)
        return prompt

    async def _encode(
        self, model: ServedModel, prompt: RenderedPrompt, overhead: StageTimer, context: int | None, *, is_chat: bool
    ) -> list[int]:
        """Tokenise; a text that is sure to have more than `context` tokens is refused before that. None: it is cut afterwards."""
        began = overhead.mark(PARSE)
        limit = context or MAX_PROMPT_TOKENS
        if len(prompt.text) > max(PROBED_CHARACTERS, CHARACTERS_PER_TOKEN * limit):
            # Ids of a text of megabytes are hundreds of megabytes, made while no other thread may run.
            least = await self._offload(partial(least_tokens, model.text.tokenizer, prompt.text, limit))
            if least >= limit:
                raise PromptTooLong(limit, f"at least {least}", is_chat=is_chat)
        most_inline = self._settings.inline_tokenize_characters
        if len(prompt.text) > most_inline and (
            len(prompt.text) > most_inline * QUICK_TIMES or not model.text.tokenizer.is_quick
        ):
            started, ids = await self._offload(lambda: (perf_counter(), _encoded(model, prompt)))
            overhead.mark_until(QUEUE, started)
        else:
            ids = _encoded(model, prompt)
        seconds = overhead.mark(TOKENISE) - began
        observe_each(self._metrics.preparation.tokenize, (seconds, seconds * 1000))
        return ids

    def plan(
        self, request: ChatRequest | CompletionRequest, effects: HeaderEffects, model: ServedModel,
        prompts: list[list[int]], options: ChatOptions | None = None,
    ) -> Plan:  # fmt: skip
        """Return the plan of a request whose prompts are tokens. Raises RequestRejected for what this model does not have."""
        if request.nvext is not None:
            check_ranks(request, model.ranks, model.prefill_ranks)
        if model.text.vocabulary_size is not None and not model.takes_text:
            check_token_ids(request, model.text.vocabulary_size)
        if request.bad_words and not model.takes_text:
            own = request.bad_words_token_ids or []
            request.bad_words_token_ids = [*own, *_spellings(request.bad_words, model.text.tokenizer)]
        fields = to_worker_fields(
            request,
            eos_token_ids=model.text.eos_token_ids,
            mdc_sum=model.mdc_sum,
            lora_name=model.lora_name,
            agent_context=effects.agent_context,
        )
        if fields.agent_context is not None:
            effects.input_trigger = input_trigger(request)
            fields.agent_context = {**fields.agent_context, "input_trigger": effects.input_trigger}
            if effects.agent_headers:
                fields.agent_context["agent_headers"] = effects.agent_headers
            owner = "" if request.cache_owner is None else f"{request.cache_owner}\n"
            fields.image_cache_scope = f"{owner}{effects.agent_id or effects.session_id}"
        sampling = fields.sampling_options
        if (guided := sampling.guided_decoding) is not None:
            self._check_guided(fields)
            closes = not self._settings.open_guided_objects
            sampling.guided_decoding = bounded_guidance(guided, closes_objects=closes)
        if sampling.n is not None:
            sampling.n = 1  # choices are fanned out into requests of one choice each
        pinned = pinned_instance(fields.routing) if fields.routing else None
        if pinned is None and self._settings.router_mode == "direct":
            raise InvalidArgument("Invalid request")  # nothing but the client knows where it should go
        limits = DispatchLimits.of(
            max(map(len, prompts), default=0),
            retries=self._settings.migration_limit,
            longest_movable_tokens=self._settings.migration_max_seq_len,
            card_retries=model.card.migration_limit,
        )
        has_nvext = request.nvext is not None
        is_query = has_nvext and any(annotation.startswith(_QUERY) for annotation in request.annotations)
        return Plan(fields, prompts, request.choices_per_prompt, pinned, limits, options, is_query=is_query)

    def _check_guided(self, fields: PlannedRequest) -> None:
        """Refuse a grammar or schema that could end a worker's compiler."""
        guided = fields.sampling_options.guided_decoding
        if guided is None or (excess := find_excess(guided, self._settings.guided)) is None:
            return
        self._metrics.refused(excess.limit)
        raise RequestRejected(
            400, f"Validation: guided decoding: `{excess.member}` {excess.detail}", param=f"guided_{excess.member}"
        )


def check_has_tokens(name: str, model: ServedModel) -> None:
    """Refuse (422) what only a tokenizer can answer, for a model that has none here."""
    if model.takes_text:
        raise not_built(f"The tokens of a prompt are not known of '{name}': that model takes text", "model")


def _spellings(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of words at the beginning of a text and behind a space, as vLLM finds them."""
    found: list[list[int]] = []
    for word in words:
        bare = tokenizer.encode_unlocked(word.lstrip())
        spaced = tokenizer.encode_unlocked(" " + word.lstrip())
        found.append(bare)
        if (
            len(spaced) == len(bare) and spaced[0] != bare[0]
        ):  # else the space is a token of its own, before the bare word
            found.append(spaced)
    return found


def _encoded(model: ServedModel, prompt: RenderedPrompt) -> list[int]:
    """Return the tokens of a prompt."""
    tokenizer, control = model.text.tokenizer, model.text.control_tokens
    if prompt.cuts and control is not None:
        return control.encode(tokenizer, prompt)
    return tokenizer.encode_unlocked(prompt.text)


def least_tokens(tokenizer: Tokenizer, text: str, limit: int) -> int:
    """Return a count that the text's tokens reach, counting no further than `limit`.

    Where the text is cut it may take a few tokens more than as a whole; as many are taken off.
    """
    least = 0
    for start in range(0, len(text), PROBED_CHARACTERS):
        least += max(0, len(tokenizer.encode_unlocked(text[start : start + PROBED_CHARACTERS])) - TOKENS_PER_CUT)
        if least >= limit:
            break
    return least


def _limits_scores(plan: Plan) -> bool:
    """Limit the choices of a request for log probabilities that names no limit; return whether there are several.

    Raises RequestRejected (400) for too many of the prompts.
    """
    wanted, stops = plan.fields.output_options, plan.fields.stop_conditions
    if (of_prompt := wanted.prompt_logprobs) is not None:
        check_prompt_scores(of_prompt, plan.choices * sum(map(len, plan.prompts)))
    alternatives, choices = wanted.logprobs, len(plan.prompts) * plan.choices
    if alternatives is None or choices == 1 or stops.max_tokens is not None:
        return False
    stops.max_tokens = most_scored_tokens(alternatives, choices)
    return True
