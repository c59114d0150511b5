// One request, in flight or ended: its phases, its routing, its attempts, what it asked for, what happened to it.

import { abortButton } from "../actions.js";
import { sparkline, timeline } from "../charts.js";
import { h } from "../dom.js";
import { address, decision, decisionText, link, pairs, panel, pathOf, state, waiting, workerLink } from "../parts.js";
import {
  UNKNOWN,
  age,
  bytes,
  clock,
  columnsText,
  count,
  duration,
  figure,
  line,
  lines,
  moment,
  pairsText,
  ratio,
} from "../text.js";
import { eventList, eventsText } from "./fleet.js";

const EVERY_SECONDS = 1; // while it is in flight

const detailPath = (id) => `/admin/v1/requests/${encodeURIComponent(id)}`;

function known(app, id) {
  const resource = app.resources.use(detailPath(id), app.store.one("streams", id) ? EVERY_SECONDS : 3);
  const detail = resource.value;
  // The watch is as new as this answer or newer, where it has the stream at all.
  const stream = app.store.one("streams", id) ?? detail?.stream ?? null;
  return { resource, detail, stream, recent: detail?.recent ?? app.store.one("recent", id) ?? null };
}

function facts({ stream, recent }, now) {
  const one = stream ?? recent;
  const isOver = stream === null;
  return [
    ["id", line(one.id)],
    ["client's id", line(one.client_request_id)],
    ["key", line(one.key)],
    ["model", line(one.model)],
    ...(one.served_by ? [["served by", line(one.served_by)]] : []),
    ["endpoint", line(one.endpoint)],
    ["frontend", line(one.frontend)],
    ["started", moment(one.started_ms)],
    ...(isOver
      ? [
          ["ended", moment(one.ended_ms)],
          ["took", duration((one.ended_ms - one.started_ms) / 1000)],
          ["outcome", line(one.outcome)],
          ["status", line(one.status)],
          ["code", line(one.code)],
          ["message", line(one.message)],
          ["finish reason", line(one.finish_reason)],
        ]
      : [
          ["age", age(one.started_ms, now)],
          ["phase", `${line(one.phase)} for ${age(one.phase_ms, now)}`],
          ["last token", one.last_token_ms ? `${age(one.last_token_ms, now)} ago` : UNKNOWN],
          ["tokens/s", figure(one.tokens_per_second)],
          ["streamed", one.is_streaming ? "yes" : "no"],
          ["choices", count(one.choices)],
          ["priority", line(one.priority)],
          ["unsent", bytes(one.client_bytes_waiting)],
        ]),
    ["wait", duration(one.queued_seconds)],
    ["TTFT", duration(one.ttft_seconds)],
    ["prompt/cached", ratio(one.prompt_tokens, one.cached_tokens)],
    ["output/max", ratio(one.output_tokens, one.max_tokens)],
    ["attempt", line(one.attempt ?? one.attempts)],
  ];
}

export function drawRequest(app, id) {
  const found = known(app, id);
  const { resource, detail, stream, recent } = found;
  const back = h("span", { class: "row" }, link(address("streams"), "← Streams"), link(address("recent"), "Recent"));
  if (stream === null && recent === null) {
    return [
      h("div", { class: "head" }, back, h("h1", { class: "id" }, line(id))),
      waiting(resource, "the request") ?? h("p", { class: "empty" }, "This request is not known any more."),
    ];
  }
  const now = app.store.now();
  return [
    h(
      "div",
      { class: "head" },
      back,
      h("h1", { class: "id" }, line(id)),
      stream
        ? stream.is_stalled
          ? h("b", { class: "stalled" }, `STALLED for ${age(stream.last_token_ms ?? stream.phase_ms, now)}`)
          : h(
              "span",
              { class: "state ok" },
              h("span", { class: "mark", "aria-hidden": "true" }, "●"),
              line(stream.phase),
            )
        : state(recent.outcome),
      h(
        "div",
        { class: "row" },
        stream ? abortButton(app, id) : null,
        h(
          "button",
          { onclick: () => app.copy(curlOf(found), "a curl command with the same parameters") },
          "Copy as curl",
        ),
        h("button", { onclick: () => app.copyView() }, "Copy as text"),
        recent?.has_bundle ? link(address("errors", null, { example: id }), "Bundle", { class: "button" }) : null,
      ),
    ),
    recent?.message ? h("p", { class: "note bad" }, line(recent.message)) : null,
    detail
      ? panel("Phases", null, timeline(detail.timeline ?? [], now ?? Date.now()))
      : waiting(resource, "its phases"),
    h(
      "div",
      { class: "halves" },
      panel("Request", null, pairs(facts(found, now))),
      h(
        "div",
        { key: "right" },
        detail
          ? panel(
              "Tokens per second, the last minute",
              null,
              sparkline(detail.token_rates, { label: "tokens per second", width: 320, height: 56 }),
            )
          : null,
        detail?.fallbacks?.length ? panel("Models", "tried one after the other", fallbacks(detail.fallbacks)) : null,
        detail
          ? panel(
              "Attempts",
              detail.attempt_limit ? `at most ${count(detail.attempt_limit)}` : null,
              attempts(detail.attempts, recent),
            )
          : null,
        detail ? panel("Parameters", null, parameters(detail.parameters)) : null,
      ),
    ),
    detail
      ? panel(
          "Routing",
          null,
          detail.routing.length
            ? detail.routing.map((one) => decision(one))
            : h("p", { class: "quiet" }, "No decision is known: it was not routed yet, or too long ago."),
        )
      : null,
    detail ? panel("Events", null, eventList([...detail.events], now)) : null,
    content(app, detail),
  ];
}

const reasonOf = (one) => (one.error ? `${line(one.reason)} (${line(one.error)})` : line(one.reason));

/** The models that did not serve a request, in order, and the one that was tried last. */
function fallbacks(list) {
  const row = (number, model, ...more) =>
    h("li", { key: `${number}` }, h("b", null, count(number)), h("span", null, line(model)), more);
  return h(
    "ol",
    { class: "plain attempts" },
    list.map((one, at) =>
      row(at + 1, one.model, h("time", null, clock(one.at_ms)), h("span", { class: "bad" }, reasonOf(one))),
    ),
    row(list.length + 1, list.at(-1).next_model, h("span", { class: "quiet" }, "tried last")),
  );
}

function attempts(list, recent) {
  if (list.length === 0 && recent?.workers.length)
    return h(
      "p",
      null,
      recent.workers.map((id, at) => [at ? " then " : "", workerLink(id)]),
      h("span", { class: "quiet" }, ` · ${count(recent.attempts)} in all; more is not kept of a request that has ended`),
    );
  if (list.length === 0) return h("p", { class: "quiet" }, recent ? "No worker had it." : "No worker has had it yet.");
  return h(
    "ol",
    { class: "plain attempts" },
    list.map((one) =>
      h(
        "li",
        { key: `${one.number}` },
        h("b", null, count(one.number)),
        workerLink(one.worker),
        h("time", null, clock(one.at_ms)),
        h("span", null, line(one.outcome)),
        h("span", { class: "quiet" }, `${count(one.output_tokens)} tokens`),
      ),
    ),
  );
}

function parameters(given) {
  const entries = Object.entries(given ?? {});
  return entries.length
    ? pairs(entries.map(([name, value]) => [line(name), line(value)]))
    : h("p", { class: "quiet" }, "None, or not kept.");
}

function content(app, detail) {
  if (detail === null) return null;
  if (detail.content === null || detail.content === undefined) {
    return h(
      "p",
      { class: "quiet" },
      app.store.fleet?.shows_content
        ? "Its content is not kept, or your key may not see it."
        : "Prompts and answers are not shown: the server runs without --inspect-content.",
    );
  }
  return panel(
    "Content",
    "kept by --inspect-content",
    Object.entries(detail.content).map(([name, value]) =>
      h(
        "div",
        { key: name },
        h("h3", null, line(name)),
        h("pre", null, lines(typeof value === "string" ? value : JSON.stringify(value, null, 2))),
      ),
    ),
  );
}

/** A command that sends a request like this one; its content is a placeholder where it is not known. */
function curlOf({ detail, stream, recent }) {
  const one = stream ?? recent;
  const shown = detail?.content ?? {};
  const isChat = one.endpoint.includes("chat") || one.endpoint.includes("messages");
  const prompt = isChat
    ? { messages: shown.messages ?? [{ role: "user", content: "PROMPT" }] }
    : { prompt: shown.prompt ?? "PROMPT" };
  const body = {
    model: one.model,
    ...(detail?.parameters ?? {}),
    ...prompt,
    ...(one.is_streaming ? { stream: true } : {}),
  };
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  return `curl ${quoted(location.origin + pathOf(one.endpoint))} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`;
}

export function requestText(app, id) {
  const found = known(app, id);
  const { detail, stream, recent } = found;
  if (stream === null && recent === null) return "this request is not known any more";
  const parts = [pairsText(facts(found, app.store.now()))];
  if (detail) {
    parts.push(
      columnsText(
        detail.timeline.map(([name, begin, end]) => [
          name,
          clock(begin),
          end === null ? "lasts" : duration((end - begin) / 1000),
        ]),
      ),
    );
    parts.push(
      columnsText((detail.fallbacks ?? []).map((one) => [line(one.model), clock(one.at_ms), reasonOf(one), `then ${line(one.next_model)}`])),
    );
    parts.push(...detail.routing.map(decisionText));
    parts.push(
      columnsText(
        detail.attempts.map((one) => [`attempt ${one.number}`, line(one.worker), clock(one.at_ms), line(one.outcome)]),
      ),
    );
    parts.push(pairsText(Object.entries(detail.parameters)));
    parts.push(eventsText([...detail.events]));
  }
  return parts.filter(Boolean).join("\n\n");
}
