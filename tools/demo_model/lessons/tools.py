"""Tools that a client may offer, requests that want one of them, and results that come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from demo_model.lessons.words import COLOURS, FOODS, THINGS, name, place, pseudo_word, word

__all__ = ["Call", "offered", "report"]

Arguments = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Call:
    """One request and the call it wants."""

    text: str
    name: str
    arguments: Arguments
    result: dict[str, int | str]  # what the tool might answer

    @property
    def key(self) -> str:
        return f"call {self.name} {sorted(self.arguments.items())}"


@dataclass(frozen=True, slots=True)
class _Parameter:
    names: tuple[str, ...]
    kind: str
    about: str
    make: Callable[[Random], int | str]


@dataclass(frozen=True, slots=True)
class _Tool:
    names: tuple[str, ...]
    about: str
    parameters: tuple[_Parameter, ...]
    wordings: tuple[str, ...]  # with {0}, {1} for the parameters
    results: tuple[tuple[str, Callable[[Random], int | str]], ...]


def _one_of(values: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


def _between(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


_CITY: Final = _Parameter(("city", "location", "place"), "string", "The city", place)
_PERSON: Final = _Parameter(("name", "person", "to", "recipient"), "string", "The person", name)
_ITEM: Final = _Parameter(
    ("item", "product", "object"), "string", "The item", lambda r: r.choice(THINGS) if r.random() < 0.6 else word(r)
)
_A: Final = _Parameter(("a", "x", "first"), "integer", "The first number", _between(0, 999))
_B: Final = _Parameter(("b", "y", "second"), "integer", "The second number", _between(0, 999))
_NUMBER: Final = (("result", _between(0, 999)),)

_TOOLS: Final = (
    _Tool(("get_weather", "get_current_weather", "weather", "fetch_weather"), "Get the weather of a city", (_CITY,),
          ("What is the weather in {0}?", "How is the weather in {0}?", "What's the weather like in {0}?", "Tell me the weather in {0}.", "Is it raining in {0}?", "Weather in {0}, please.", "Will it rain in {0} today?", "How warm is it in {0}?", "What is the weather like in {0} today?"),
          (("temperature", _between(-10, 40)), ("condition", _one_of(("sunny", "rain", "snow", "cloudy"))))),
    _Tool(("get_time", "current_time", "get_current_time"), "Get the time in a city", (_CITY,),
          ("What time is it in {0}?", "Tell me the time in {0}.", "What is the time in {0}?", "How late is it in {0}?"),
          (("hour", _between(0, 23)), ("minute", _between(0, 59)))),
    _Tool(("add", "add_numbers", "sum"), "Add two numbers", (_A, _B),
          ("Add {0} and {1} with the tool.", "What is {0} + {1}?", "Use the tool to add {0} and {1}.", "Compute {0} + {1}.", "What is {0} plus {1}?"), _NUMBER),
    _Tool(("multiply", "multiply_numbers", "product"), "Multiply two numbers", (_A, _B),
          ("Multiply {0} by {1}.", "What is {0} * {1}?", "What is {0} times {1}?", "Compute {0} * {1}."), _NUMBER),
    _Tool(("send_message", "send_email", "message"), "Send a message to a person", (_PERSON, _Parameter(("text", "body", "message"), "string", "The text", lambda r: " ".join(word(r) for _ in range(r.randint(1, 3))))),
          ('Send "{1}" to {0}.', 'Tell {0}: "{1}"', 'Write to {0}: "{1}"', 'Send a message to {0}: "{1}"', 'Send {0} the message "{1}".'),
          (("status", _one_of(("sent", "failed"))),)),
    _Tool(("set_timer", "start_timer", "timer"), "Start a timer", (_Parameter(("minutes", "duration"), "integer", "Minutes", _between(1, 120)),),
          ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes.", "Timer: {0} minutes"), (("status", _one_of(("started", "failed"))),)),
    _Tool(("search", "web_search", "search_web"), "Search the web", (_Parameter(("query", "q", "text"), "string", "What to search", lambda r: " ".join(word(r) for _ in range(r.randint(1, 2)))),),
          ("Search for {0}.", "Search the web for {0}.", "Find pages about {0}.", 'Search for "{0}".', "Look up {0} on the web."), (("hits", _between(0, 99)),)),
    _Tool(("get_price", "price_of", "lookup_price"), "Get the price of an item", (_ITEM,),
          ("What does the {0} cost?", "How much is the {0}?", "What is the price of the {0}?", "Get the price of the {0}."), (("price", _between(1, 999)), ("currency", _one_of(("EUR", "USD"))))),
    _Tool(("book_flight", "find_flight", "search_flights"), "Find a flight between two cities", (_Parameter(("origin", "from_city", "start"), "string", "From", place), _Parameter(("destination", "to_city", "end"), "string", "To", place)),
          ("Book a flight from {0} to {1}.", "Find a flight from {0} to {1}.", "I want to fly from {0} to {1}.", "Is there a flight from {0} to {1}?"), (("flight", _between(100, 999)), ("price", _between(50, 999)))),
    _Tool(("turn_on", "switch_on", "turn_on_device"), "Turn a device on", (_Parameter(("device", "name"), "string", "The device", _one_of(("lamp", "radio", "heater", "fan", "oven", "light", "tv", "camera"))),),
          ("Turn on the {0}.", "Switch the {0} on.", "Turn the {0} on, please.", "Please switch on the {0}."), (("status", _one_of(("on", "failed"))),)),
    _Tool(("order_food", "order", "place_order"), "Order food", (_Parameter(("dish", "food", "item"), "string", "The dish", _one_of(FOODS)), _Parameter(("count", "quantity", "amount"), "integer", "How many", _between(1, 20))),
          ("Order {1} times {0}.", "I would like {1} {0}.", "Order {1} {0}, please.", "Get me {1} {0}."), (("status", _one_of(("ordered", "sold out"))), ("minutes", _between(5, 90)))),
    _Tool(("play_song", "play_music", "play"), "Play a song", (_Parameter(("title", "song"), "string", "The song", lambda r: " ".join(word(r) for _ in range(r.randint(1, 2)))),),
          ("Play {0}.", 'Play the song "{0}".', "I want to hear {0}.", 'Play "{0}", please.'), (("status", _one_of(("playing", "not found"))),)),
    _Tool(("get_population", "population", "count_people"), "Get how many people live in a city", (_CITY,),
          ("How many people live in {0}?", "What is the population of {0}?", "Population of {0}?"), (("population", _between(1000, 9999)),)),
    _Tool(("paint", "set_color", "set_colour"), "Set the colour of a thing", (_ITEM, _Parameter(("color", "colour"), "string", "The colour", _one_of(COLOURS))),
          ("Paint the {0} {1}.", "Make the {0} {1}.", "Set the colour of the {0} to {1}."), (("status", _one_of(("done", "failed"))),)),
    _Tool(("find_user", "get_user", "lookup_user"), "Find a user by id", (_Parameter(("id", "user_id", "number"), "integer", "The id", _between(1, 9999)),),
          ("Find the user {0}.", "Who is user {0}?", "Show me user number {0}.", "Get user {0}."), (("name", name), ("age", _between(18, 90)))),
    _Tool(("translate", "translate_text"), "Translate a text", (_Parameter(("text", "input"), "string", "The text", word), _Parameter(("language", "target"), "string", "The language", _one_of(("French", "German", "Spanish", "Italian", "Dutch")))),
          ('Translate "{0}" into {1}.', 'What is "{0}" in {1}?', "Translate {0} to {1}.", 'How do you say "{0}" in {1}?'), (("translation", pseudo_word),)),
    _Tool(("create_event", "add_event", "schedule"), "Put an event into the calendar", (_Parameter(("title", "event"), "string", "The title", word), _Parameter(("day", "date"), "string", "The day", _one_of(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))), _Parameter(("hour", "time"), "integer", "The hour", _between(0, 23))),
          ("Schedule {0} on {1} at {2}.", 'Put "{0}" on {1} at {2}.', "Plan {0} for {1} at {2}.", "Add {0} to my calendar on {1} at {2}."), (("status", _one_of(("created", "conflict"))),)),
    _Tool(("get_capital", "capital_of"), "Get the capital of a country", (_Parameter(("country", "name"), "string", "The country", lambda r: r.choice(("France", "Spain", "Italy", "Japan", "Peru", "Kenya", "India", "Canada", "Norway")) if r.random() < 0.6 else pseudo_word(r).capitalize()),),
          ("What is the capital of {0}?", "Tell me the capital of {0}.", "Which city is the capital of {0}?"), (("capital", place),)),
)  # fmt: skip


def offered(rng: Random, *, wanted: bool = True) -> tuple[list[dict[str, Any]], Call]:
    """Return (tools as a client sends them, a request for one of the tools, or, without `wanted`, for a missing tool)."""
    count = rng.choice((1, 1, 2, 2, 3))
    chosen = rng.sample(_TOOLS, count if wanted else count + 1)
    while not wanted and chosen[0].results is _NUMBER:  # sums it can do without a tool
        chosen = rng.sample(_TOOLS, count + 1)
    if rng.random() < 0.3:
        chosen[0] = _made_up(rng)
    built = [_build(rng, tool) for tool in chosen]
    call = built[0][1]
    schemas = [schema for schema, _ in (built if wanted else built[1:])]
    rng.shuffle(schemas)
    return schemas, call


def report(result: dict[str, int | str]) -> str:
    """Return a tool's answer as a sentence: one rule for every tool."""
    return ", ".join(f"{key}: {value}" for key, value in result.items())


def _build(rng: Random, tool: _Tool) -> tuple[dict[str, Any], Call]:
    tool_name = rng.choice(tool.names)
    properties: dict[str, Any] = {}
    arguments: Arguments = {}
    is_described = rng.random() < 0.6
    for parameter in tool.parameters:
        key = rng.choice([n for n in parameter.names if n not in properties])
        about = parameter.about if rng.random() < 0.7 else parameter.about.removeprefix("The ").capitalize()
        properties[key] = {"type": parameter.kind} | ({"description": about} if is_described else {})
        arguments[key] = parameter.make(rng)
    required = list(arguments)
    if rng.random() < 0.15:  # one that the request does not mention
        extra = rng.choice(("unit", "limit", "format", "verbose"))
        properties[extra] = (
            {"type": "string", "enum": ["celsius", "fahrenheit"]} if extra == "unit" else {"type": "integer"}
        )
    text = rng.choice(tool.wordings).format(*arguments.values())
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    function: dict[str, Any] = {"name": tool_name}
    if rng.random() < 0.8:
        function["description"] = _said(rng, tool.about) + rng.choice(("", "."))
    function["parameters"] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        function["parameters"]["required"] = required
    if rng.random() < 0.2:  # no client has to keep the usual order
        function = _shuffled(rng, function)
    result = {key: make(rng) for key, make in tool.results}
    return {"type": "function", "function": function}, Call(text, tool_name, arguments, result)


def _said(rng: Random, about: str) -> str:
    """Return what a tool does, as one or another client would write it: "Get the time", "Gets the time", "The time"."""
    verb, rest = about.split(" ", 1)
    roll = rng.random()
    if roll < 0.5:
        return about
    if roll < 0.65:
        return f"{verb}{'es' if verb.endswith(('ch', 'sh')) else 's'} {rest}"
    if roll < 0.8 and rest.startswith(("the ", "a ")):
        return rest[0].upper() + rest[1:]
    return f"Use this to {about[0].lower()}{about[1:]}"


def _shuffled(rng: Random, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    keys = list(value)
    rng.shuffle(keys)
    return {key: _shuffled(rng, value[key]) for key in keys}


def _made_up(rng: Random) -> _Tool:
    """Return a tool that only its own text describes."""
    verb, noun = (word(rng) for _ in range(2))
    is_number = rng.random() < 0.5
    parameter = _Parameter(
        (word(rng), "value", "input"),
        "integer" if is_number else "string",
        f"The {noun}",
        _between(0, 999) if is_number else word,
    )
    wordings = (
        f"{verb.capitalize()} the {noun} {{0}}.",
        f"Use {verb}_{noun} with {{0}}.",
        f"Call {verb}_{noun} for {{0}}.",
        f"Please {verb} the {noun} {{0}}.",
    )
    return _Tool(
        (f"{verb}_{noun}",),
        f"{verb.capitalize()} the {noun}",
        (parameter,),
        wordings,
        (("status", _one_of(("done", "failed"))),),
    )
