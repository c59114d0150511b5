"""The picker from the messages of a gateway to the accounts of the router, over real models and workers in one process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.picker.choice import Picker
from dynamo.picker.exchange import GatewayExchange
from dynamo.picker.messages import read_message
from dynamo.picker.settings import PickerSettings
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.kv.settings import KvRouterSettings
from support.frontend_cluster import Cluster, cluster
from support.gateway import (
    BUFFERED,
    DUPLEX,
    NO_BODY,
    Answer,
    NumberedAddresses,
    body_message,
    completion,
    read_answer,
    request_headers,
    response_headers,
)

BLOCK = 4
PROMPT = list(range(1, 34))


class House:
    """A picker and its models."""

    def __init__(self, models: Cluster, **picker: Any) -> None:
        self.models, self.addresses = models, NumberedAddresses()
        self.picker = Picker(models.frontend, self.addresses, **picker)
        self.open: list[GatewayExchange] = []

    async def workers(self, count: int, **members: Any) -> list[str]:
        config = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=8192, max_num_seqs=4)
        found = [
            await self.models.worker(kv_cache_block_size=BLOCK, runtime_config=config, **members) for _ in range(count)
        ]
        return self.addresses.name(*[each.endpoint.connection_id() for each in found])

    def exchange(self) -> GatewayExchange:
        made = GatewayExchange(self.picker, PickerSettings())
        self.open.append(made)
        return made

    async def send(self, exchange: GatewayExchange, *messages: bytes) -> list[Answer]:
        found = []
        for message in messages:
            answers = exchange.take(read_message(message))
            found += [read_answer(each) for each in (answers if isinstance(answers, list) else await answers)]
        return found

    async def ask(self, body: bytes | None = None, *, modes: tuple[int, int] = BUFFERED, **head: Any) -> Answer:
        """Send a request as a gateway does, and return the answer with the choice. The exchange is the last of `open`."""
        body = completion(PROMPT) if body is None else body
        answers = await self.send(
            self.exchange(), request_headers(modes=modes, **head), body_message(4, body, is_last=True)
        )
        return next(each for each in answers if each.kind == "immediate" or each.headers)

    @property
    def booked(self) -> int:
        domains = self.models.frontend.models._rules.kv
        assert domains is not None
        return sum(len(each.placement) for each in domains._domains.values())

    @property
    def held(self) -> int:
        return sum(model.admission.in_flight for model in self.models.frontend.models.served())

    def load_of(self, address: str) -> int:
        """How many requests are booked at a worker."""
        domains = self.models.frontend.models._rules.kv
        assert domains is not None
        (domain,) = domains._domains.values()
        (worker_id,) = [each for each, named in self.addresses.by_id.items() if named == address]
        load = domain.placement.router.load
        return sum(len(load.of(rank).booked) for rank in domain.ranks if rank.worker_id == worker_id)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    kv = KvRouterSettings(policy="default", router_predicted_ttl_secs=100.0)
    async with cluster(tmp_path, router_mode="kv", kv_router=kv, overload_status=429) as models:
        made = House(models)
        yield made
        for each in made.open:
            each.close()
        assert (made.booked, made.held) == (0, 0), "every end of an exchange gives back what it held"


# -- the choice ------------------------------------------------------------------------------------------------------


async def test_the_header_and_the_metadata_name_the_same_worker(house: House) -> None:
    addresses = await house.workers(3)
    answer = await house.ask()
    assert (answer.kind, answer.destination in addresses, answer.reroutes) == ("request_body", True, True)
    (worker_id,) = [each for each, named in house.addresses.by_id.items() if named == answer.destination]
    assert answer.headers["x-dynamo-worker-instance-id"] == str(worker_id)
    assert answer.headers["x-dynamo-dp-rank"] == "0"
    assert set(answer.removed) == {
        "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served",
    }  # fmt: skip


async def test_a_prompt_goes_where_it_went_before(house: House) -> None:
    await house.workers(4)
    first = (await house.ask()).destination
    house.open[-1].close()
    for _ in range(5):
        assert (await house.ask()).destination == first
        house.open[-1].close()


async def test_requests_that_run_are_spread_by_their_load(house: House) -> None:
    addresses = await house.workers(4)
    found = {(await house.ask(completion([n] * 64))).destination for n in range(1, 5)}
    assert found == set(addresses)
    assert [house.load_of(each) for each in addresses] == [1, 1, 1, 1]


async def test_in_full_duplex_the_whole_body_follows_the_choice(house: House) -> None:
    await house.workers(2)
    exchange, body = house.exchange(), completion("x" * 200_000, max_tokens=1)
    assert await house.send(exchange, request_headers(modes=DUPLEX)) == []
    assert await house.send(exchange, body_message(4, body[:100_000], is_last=False)) == []
    answers = await house.send(
        exchange, body_message(4, body[100_000:], is_last=False), body_message(4, b"", is_last=True)
    )
    assert [each.kind for each in answers] == ["request_headers", *["request_body"] * 4]
    assert b"".join(each.body for each in answers) == body
    assert answers[0].destination
    assert answers[-1].is_last
    assert await house.send(exchange, body_message(4, b"", is_last=True)) == [], "a second end of the body is ignored"


async def test_a_request_without_a_body_goes_to_any_worker(house: House) -> None:
    addresses = await house.workers(2)
    found = set()
    for _ in range(40):
        (answer,) = await house.send(house.exchange(), request_headers("/v1/models", method="GET", is_last=True))
        found.add(answer.destination)
    assert found == set(addresses)


async def test_where_no_body_is_sent_the_headers_alone_are_answered(house: House) -> None:
    addresses = await house.workers(1)
    (answer,) = await house.send(house.exchange(), request_headers(modes=NO_BODY))
    assert answer.destination == addresses[0]


async def test_only_the_workers_of_the_subset_are_chosen(house: House) -> None:
    addresses = await house.workers(4)
    for hint in ([addresses[2]], addresses[2], f" {addresses[2]} ,10.9.9.9:1"):
        assert (await house.ask(hint=hint)).destination == addresses[2]
        (answer,) = await house.send(house.exchange(), request_headers("/", method="GET", hint=hint, is_last=True))
        assert answer.destination == addresses[2]


@pytest.mark.parametrize("hint", [[], "", ["10.9.9.9:8000"]])
async def test_a_subset_without_any_worker_is_a_503(house: House, hint: object) -> None:
    await house.workers(2)
    assert (await house.ask(hint=hint)).status == 503
    (answer,) = await house.send(house.exchange(), request_headers("/", method="GET", hint=hint, is_last=True))
    assert answer.status == 503


async def test_a_worker_without_an_address_is_not_chosen(house: House) -> None:
    addresses = await house.workers(1)
    await house.models.worker(kv_cache_block_size=BLOCK)  # on a plane that no gateway reaches
    for n in range(8):
        assert (await house.ask(completion([n] * 32))).destination == addresses[0]


async def test_further_workers_are_named_where_that_is_set(house: House) -> None:
    addresses = await house.workers(3)
    house.picker._fallbacks = 5
    answer = await house.ask()
    named = answer.destination.split(",")
    assert set(answer.headers) == {"x-gateway-destination-endpoint"}, "a retry would carry the worker's id elsewhere"
    assert sorted(named) == sorted(addresses)
    assert [house.load_of(each) for each in named] == [1, 0, 0], "only the first is booked"
    named = (await house.ask(hint=addresses[:2])).destination.split(",")
    assert sorted(named) == addresses[:2]


CHAT = [{"role": "user", "content": "hi " * 40}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE, *[{"type": "text", "text": "x"}]]}]},
        ),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 5}),
        ("/v1/responses", {"input": "hi " * 40}),
        ("/v1/completions?beta=true", {"prompt": "hi " * 40}),
    ],
)
async def test_every_api_of_text_is_placed_and_booked(house: House, path: str, members: dict[str, Any]) -> None:
    addresses = await house.workers(2)
    where = (await house.ask(json.dumps({"model": "m", **members}).encode(), path=path)).destination
    assert [house.load_of(each) for each in addresses] == [int(each == where) for each in addresses]


async def test_a_request_that_names_its_worker_goes_there(house: House) -> None:
    addresses = await house.workers(3)
    for worker_id, address in house.addresses.by_id.items():
        assert (await house.ask(x_dynamo_worker_instance_id=str(worker_id))).destination == address
    other: dict[str, Any] = {"hint": [addresses[0]], "x_dynamo_worker_instance_id": str(list(house.addresses.by_id)[1])}
    assert (await house.ask(**other)).status == 503, "a gateway's subset beats what a client names"


async def test_the_mode_without_accounts_takes_workers_in_turn(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as models:
        house = House(models, fallbacks=2)
        addresses = await house.workers(3)
        named = [(await house.ask()).destination.split(",") for _ in range(6)]
        assert [each[0] for each in named[:3]] == [each[0] for each in named[3:]]
        assert {each[0] for each in named} == set(addresses)
        assert all(sorted(each) == sorted(addresses) for each in named)
        for each in house.open:
            each.close()
        assert house.held == 0


# -- refusals --------------------------------------------------------------------------------------------------------


async def test_without_workers_the_answer_is_a_503_or_the_404_of_the_frontend(house: House) -> None:
    assert (await house.ask()).status == 404
    assert (await house.send(house.exchange(), request_headers("/", method="GET", is_last=True)))[0].status == 503
    assert not house.picker.is_ready
    await house.workers(1)
    assert house.picker.is_ready


async def test_the_loss_of_the_last_worker_is_a_503(house: House) -> None:
    await house.workers(1)
    await house.models.workers[0].stop()
    await house.models.gone("m")
    answer = await house.ask()
    assert (answer.status, "retry-after" in answer.headers) == (503, True)


async def test_a_request_that_is_shed_is_a_429(house: House) -> None:
    await house.workers(2)
    for pool in house.models.frontend.models.pools():
        pool.busy = pool.member_ids
    answer = await house.ask()
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert json.loads(answer.body)["error"]["message"]


async def test_a_bad_body_gets_the_answer_of_the_frontend(house: House) -> None:
    await house.workers(1)
    assert (await house.ask(b"{")).status == 400
    answer = await house.ask(completion(PROMPT, temperature=9))
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")


async def test_a_body_that_is_too_long_is_a_413(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="kv", body_limit_bytes=1000) as models:
        house = House(models)
        await house.workers(1)
        exchange = house.exchange()
        answers = await house.send(exchange, request_headers(), body_message(4, b"x" * 1001, is_last=False))
        assert ([each.status for each in answers], exchange.is_over) == ([413], True)


async def test_a_streamed_body_is_refused_with_a_sentence(house: House) -> None:
    (answer,) = await house.send(house.exchange(), request_headers(modes=(1, 0)))
    assert (answer.status, b"FULL_DUPLEX_STREAMED" in answer.body) == (500, True)


# -- the answer ------------------------------------------------------------------------------------------------------


async def test_a_booking_ends_with_the_end_of_the_answer(house: House) -> None:
    await house.workers(2)
    where = (await house.ask(modes=DUPLEX)).destination
    exchange = house.open[-1]
    (answer,) = await house.send(exchange, response_headers(served=where))
    assert (answer.kind, house.booked, house.load_of(where)) == ("response_headers", 1, 1)
    (answer,) = await house.send(exchange, body_message(5, b"data: a\n\n", is_last=False))
    assert (answer.body, answer.is_last, house.booked) == (b"data: a\n\n", False, 1)
    (answer,) = await house.send(exchange, body_message(5, b"", is_last=True))
    assert (answer.is_last, house.booked, house.held) == (True, 0, 0)


async def test_a_prompt_counts_as_computed_with_the_first_output(house: House) -> None:
    await house.workers(1)
    for token, modes in enumerate((DUPLEX, BUFFERED), 7):
        await house.ask(completion([token] * 64), modes=modes)
        exchange = house.open[-1]
        assert prefill(house) == 64
        await house.send(exchange, response_headers())
        if modes is DUPLEX:
            assert prefill(house) == 64, "the headers come before the prompt is computed"
            await house.send(exchange, body_message(5, b"data: a\n\n", is_last=False))
        assert prefill(house) == 0
        exchange.close()


async def test_an_account_moves_to_the_worker_that_served(house: House) -> None:
    addresses = await house.workers(2)
    chosen = (await house.ask()).destination
    (other,) = set(addresses) - {chosen}
    await house.send(house.open[-1], response_headers(served=other))
    assert [house.load_of(each) for each in (chosen, other)] == [0, 1]


async def test_a_client_that_leaves_frees_its_worker(house: House) -> None:
    await house.workers(1)
    await house.ask(modes=DUPLEX)
    house.open[-1].close()  # which is all that a stream shows of it
    assert (house.booked, house.held) == (0, 0)


def prefill(house: House) -> int:
    domains = house.models.frontend.models._rules.kv
    assert domains is not None
    (domain,) = domains._domains.values()
    load = domain.placement.router.load
    return sum(load.of(rank).prefill_tokens for rank in domain.ranks)


# -- the same choices ------------------------------------------------------------------------------------------------


async def test_a_thousand_prompts_go_where_the_frontend_sends_them(tmp_path: Path) -> None:
    """Prompts of forty families that share prefixes, one after another, with the same seed on both sides."""
    families = [[1000 + family] * (BLOCK * (2 + family % 7)) for family in range(40)]
    prompts = [[*families[n * 7 % 40], *[n + 1] * (n % 23 + 1)] for n in range(1000)]
    chosen = {}
    for who in ("frontend", "picker"):
        kv = KvRouterSettings(policy="default", router_predicted_ttl_secs=1000.0)
        async with cluster(tmp_path / who, router_mode="kv", kv_router=kv) as models:
            models.frontend.kernel.runtime.rng.seed(7)
            house = House(models)
            await house.workers(5)
            by_id = {each.endpoint.connection_id(): each for each in models.workers}
            order = {named: at for at, named in enumerate(sorted(by_id))}
            if who == "frontend":
                chosen[who] = [await _by_frontend(models, prompt, order) for prompt in prompts]
            else:
                numbers = {house.addresses.by_id[each]: at for each, at in order.items()}
                chosen[who] = []
                for prompt in prompts:
                    chosen[who].append(numbers[(await house.ask(completion(prompt))).destination])
                    await house.send(house.open[-1], response_headers())
                    house.open.pop().close()
    assert chosen["frontend"] == chosen["picker"]
    assert len(set(chosen["picker"])) == 5, "one worker for all would prove nothing"


async def _by_frontend(models: Cluster, prompt: list[int], order: dict[int, int]) -> int:
    before = [len(each.requests) for each in models.workers]
    assert (await models.client.completion(prompt, max_tokens=5)).status == 200
    (worker,) = [each for each, had in zip(models.workers, before, strict=True) if len(each.requests) > had]
    return order[worker.endpoint.connection_id()]
