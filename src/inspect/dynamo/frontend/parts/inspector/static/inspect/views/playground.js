// Chat with any model through the public API, and see what went over the wire: one model, or two side by side.

import { h } from "../dom.js";
import { panel } from "../parts.js";
import { readEvents } from "../stream.js";
import { UNKNOWN, bytes, count, duration, figure, line, lines } from "../text.js";

const CHAT = "/v1/chat/completions";
const MODELS = "/v1/models";
const MAX_IMAGE_BYTES = 8_000_000;
const MAX_RAW = 200_000; // characters of events that are kept to be shown
const NUMBERS = [
  ["temperature", "0 to 2"],
  ["top_p", "0 to 1"],
  ["max_tokens", ""],
  ["seed", ""],
  ["presence_penalty", ""],
  ["frequency_penalty", ""],
];
const TEXTS = [
  ["tools", "JSON: a list of tools"],
  ["schema", "JSON: the schema of the answer"],
  ["extra", "JSON: more members of the request"],
];

const given = {
  prompt: "",
  system: "",
  stop: "",
  key: "",
  logprobs: false,
  hasTwo: false,
  numbers: {},
  texts: {},
  image: null,
  problem: null,
};

class Side {
  model = "";
  messages = [];
  run = null;

  constructor(name) {
    this.name = name;
  }

  get isRunning() {
    return this.run !== null && this.run.endedAt === null;
  }
}

const sides = [new Side("first"), new Side("second")];

const shown = () => (given.hasTwo ? sides : sides.slice(0, 1));

export const playground = {
  id: "playground",
  label: "Playground",
  letter: "y",
  watch: ["models"],
  keys: [["Ctrl-Enter", "send, from the prompt"]],

  draw(app) {
    const resource = app.resources.use(MODELS, 10);
    const head = h(
      "div",
      { class: "head" },
      h("h1", null, "Playground"),
      h("span", { class: "quiet" }, "requests of this page are real ones, and count as such"),
    );
    if (resource.value === null && resource.error && resource.error.status === 404) {
      return [
        head,
        h(
          "p",
          { class: "empty" },
          "The API is not served on this port: this is the admin listener (--admin-port). The playground works where both share a port, as with `dynamo serve`.",
        ),
      ];
    }
    const names = resource.value?.data.map((model) => model.id) ?? app.store.list("models").map((model) => model.name);
    if (app.route.query.model && !sides[0].model) sides[0].model = app.route.query.model;
    sides.forEach((side, at) => (side.model ||= names[Math.min(at, names.length - 1)] ?? ""));
    return [
      head,
      h(
        "div",
        { class: "playground" },
        h("div", { class: "settings", key: "settings" }, settings(app)),
        h(
          "div",
          { class: `sides${given.hasTwo ? " two" : ""}`, key: "sides" },
          shown().map((side) => drawSide(app, side, names)),
          composer(app),
        ),
      ),
    ];
  },

  text() {
    return shown()
      .map((side) =>
        [
          `model ${side.model}`,
          ...side.messages.map((one) => `${one.role}: ${textOf(one.content)}`),
          side.run
            ? `assistant: ${side.run.text}\n${timings(side.run)
                .map(([name, value]) => `${name} ${value}`)
                .join(", ")}`
            : "",
        ].join("\n"),
      )
      .join("\n\n");
  },
};

function field(label, control, note = null) {
  return h("label", { key: label }, label, control, note ? h("span", { class: "quiet" }, note) : null);
}

function settings(app) {
  const area = (value, set, rows, placeholder) =>
    h("textarea", {
      rows: String(rows),
      value,
      placeholder,
      spellcheck: "false",
      oninput: (event) => set(event.target.value),
    });
  return panel(
    "Parameters",
    null,
    field(
      "System prompt",
      area(given.system, (value) => (given.system = value), 2, "none"),
    ),
    h(
      "div",
      { class: "grid2" },
      NUMBERS.map(([name, hint]) =>
        field(
          name,
          h("input", {
            name,
            inputmode: "decimal",
            placeholder: hint || "default",
            autocomplete: "off",
            oninput: (event) => (given.numbers[name] = event.target.value),
          }),
        ),
      ),
    ),
    field(
      "stop",
      h("input", {
        name: "stop",
        placeholder: "none",
        autocomplete: "off",
        oninput: (event) => (given.stop = event.target.value),
      }),
    ),
    TEXTS.map(([name, hint]) =>
      field(
        name === "schema" ? "response schema" : name,
        area(given.texts[name] ?? "", (value) => (given.texts[name] = value), 2, hint),
      ),
    ),
    h(
      "label",
      null,
      "image",
      h("input", {
        type: "file",
        name: "image",
        accept: "image/*",
        onchange: (event) => take(app, event.target.files[0]),
      }),
      given.image ? h("span", { class: "quiet" }, `${line(given.image.name)}, ${bytes(given.image.size)}`) : null,
    ),
    h(
      "label",
      { class: "tick" },
      h("input", { type: "checkbox", name: "logprobs", onchange: (event) => (given.logprobs = event.target.checked) }),
      "log probabilities, as colour",
    ),
    h(
      "label",
      { class: "tick" },
      h("input", {
        type: "checkbox",
        name: "two",
        checked: given.hasTwo,
        onchange: (event) => ((given.hasTwo = event.target.checked), app.draw()),
      }),
      "two models side by side",
    ),
    field(
      "key for these requests",
      h("input", {
        name: "api-key",
        type: "password",
        placeholder: "the key of this page",
        autocomplete: "off",
        oninput: (event) => (given.key = event.target.value),
      }),
    ),
  );
}

async function take(app, file) {
  given.image = null;
  given.problem = null;
  if (file) {
    if (file.size > MAX_IMAGE_BYTES)
      given.problem = `the image has ${bytes(file.size)}, and ${bytes(MAX_IMAGE_BYTES)} are sent at most`;
    else given.image = { name: file.name, size: file.size, url: await dataUrl(file) };
  }
  app.draw();
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

function composer(app) {
  const isRunning = shown().some((side) => side.isRunning);
  const sendAll = (event) => (event.preventDefault(), send(app));
  return h(
    "form",
    { class: "composer", key: "composer", onsubmit: sendAll },
    given.problem ? h("p", { class: "note bad", role: "alert" }, line(given.problem)) : null,
    h("textarea", {
      id: "prompt",
      rows: "3",
      placeholder: "A message. Ctrl-Enter sends it.",
      "aria-label": "Message",
      value: given.prompt,
      oninput: (event) => (given.prompt = event.target.value),
      onkeydown: (event) => (event.ctrlKey || event.metaKey) && event.key === "Enter" && sendAll(event),
    }),
    h(
      "div",
      { class: "row end" },
      h(
        "button",
        {
          type: "button",
          onclick: () => (sides.forEach((side) => ((side.messages = []), (side.run = null))), app.draw()),
          disabled: isRunning,
        },
        "Clear",
      ),
      isRunning
        ? h(
            "button",
            {
              type: "button",
              class: "danger",
              key: "stop",
              onclick: () => shown().forEach((side) => side.run?.abort.abort()),
            },
            "Stop",
          )
        : h("button", { class: "primary", key: "send" }, "Send"),
    ),
  );
}

function drawSide(app, side, names) {
  const run = side.run;
  return h(
    "section",
    { class: "panel side-panel", key: side.name },
    h(
      "header",
      null,
      h(
        "label",
        null,
        h("span", { class: "unseen" }, `Model, ${side.name}`),
        h(
          "select",
          {
            name: `model-${side.name}`,
            value: side.model,
            onchange: (event) => ((side.model = event.target.value), app.draw()),
          },
          names.map((name) => h("option", { key: name, value: name }, line(name))),
        ),
      ),
    ),
    h(
      "div",
      { class: "talk" },
      side.messages.map((one, at) =>
        h(
          "div",
          { key: `${at}`, class: `said ${one.role}` },
          h("b", null, one.role),
          h("pre", null, lines(textOf(one.content))),
        ),
      ),
      run ? answer(run) : null,
    ),
    run
      ? h(
          "div",
          { class: "timings" },
          timings(run).map(([name, value]) =>
            h("span", { key: name }, h("span", { class: "quiet" }, name), h("b", null, value)),
          ),
        )
      : null,
    run
      ? h(
          "details",
          { key: "raw" },
          h("summary", null, "Raw request and events"),
          h("h3", null, `POST ${CHAT}`),
          h("pre", { class: "raw" }, lines(JSON.stringify(run.body, shorten, 2))),
          h(
            "h3",
            null,
            `Answer${run.status ? ` ${run.status}` : ""}`,
            run.requestId ? h("span", { class: "quiet" }, ` ${line(run.requestId)}`) : null,
          ),
          h("pre", { class: "raw" }, lines(run.raw), run.isCut ? "\n… (cut)" : ""),
        )
      : null,
  );
}

function answer(run) {
  return h(
    "div",
    {
      class: "said assistant",
      key: "answer",
      "aria-live": "polite",
      "aria-busy": run.endedAt === null ? "true" : "false",
    },
    h("b", null, "assistant"),
    run.reasoning ? h("pre", { class: "reasoning" }, lines(run.reasoning)) : null,
    run.tokens.length
      ? h(
          "pre",
          { class: "tokens" },
          run.tokens.map((token, at) => drawToken(token, at)),
        )
      : h("pre", null, lines(run.text)),
    run.tokens.length
      ? h(
          "p",
          { class: "chances quiet" },
          "probability of each token ",
          CHANCES.map((text, at) => h("span", { key: text, class: `chance${at}` }, text)),
        )
      : null,
    run.calls.map((call, at) =>
      h("pre", { class: "call", key: `call ${at}` }, `${line(call.name)}(${lines(call.arguments)})`),
    ),
    run.problem ? h("p", { class: "note bad", role: "alert" }, line(run.problem)) : null,
    run.finish ? h("p", { class: "quiet" }, `finish: ${line(run.finish)}`) : null,
  );
}

const CHANCES = ["below 20 %", "40 %", "60 %", "80 %", "above"]; // by step

/** A token coloured by its probability, in five steps; the figures are in its tooltip, and its class tells the step. */
function drawToken(token, at) {
  const chance = Math.exp(token.logprob);
  const others = token.top
    .map((one) => `${JSON.stringify(one.token)} ${(Math.exp(one.logprob) * 100).toFixed(1)} %`)
    .join("\n");
  return h(
    "span",
    {
      key: `${at}`,
      class: `chance${Math.min(4, Math.floor(chance * 5))}`,
      title: `${JSON.stringify(token.token)} ${(chance * 100).toFixed(1)} %${others ? `\n${others}` : ""}`,
    },
    lines(token.token),
  );
}

function shorten(_, value) {
  return typeof value === "string" && value.startsWith("data:") && value.length > 200
    ? `${value.slice(0, 60)}… (${value.length} characters)`
    : value;
}

function textOf(content) {
  if (typeof content === "string") return content;
  return content.map((part) => (part.type === "text" ? part.text : "[image]")).join("\n");
}

function timings(run) {
  const end = run.endedAt ?? performance.now();
  const seconds = (end - run.startedAt) / 1000;
  const first = run.firstAt === null ? null : (run.firstAt - run.startedAt) / 1000;
  const tokens = run.usage?.completion_tokens ?? null;
  const decoding = run.firstAt === null ? 0 : (end - run.firstAt) / 1000;
  return [
    ["TTFT", duration(first ?? undefined)],
    ["total", duration(seconds)],
    ["prompt", count(run.usage?.prompt_tokens)],
    ["cached", count(run.usage?.prompt_tokens_details?.cached_tokens)],
    ["output", count(tokens)],
    ["tok/s", tokens !== null && tokens > 1 && decoding > 0 ? figure((tokens - 1) / decoding) : UNKNOWN],
  ];
}

/** The request as the parameters say. Raises Error for what is not a number or not JSON. */
function bodyOf(side) {
  const body = {
    model: side.model,
    messages: [...(given.system ? [{ role: "system", content: given.system }] : []), ...side.messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [name] of NUMBERS) {
    const text = (given.numbers[name] ?? "").trim();
    if (text === "") continue;
    if (!Number.isFinite(Number(text))) throw new Error(`${name}: ${text} is not a number`);
    body[name] = Number(text);
  }
  if (given.stop) body.stop = given.stop;
  if (given.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const json = (name) => {
    const text = (given.texts[name] ?? "").trim();
    if (text === "") return null;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
  };
  const [tools, schema, extra] = [json("tools"), json("schema"), json("extra")];
  if (tools) body.tools = tools;
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return { ...body, ...extra };
}

function send(app) {
  if (shown().some((side) => side.isRunning) || given.prompt.trim() === "") return;
  given.problem = null;
  const content = given.image
    ? [
        { type: "text", text: given.prompt },
        { type: "image_url", image_url: { url: given.image.url } },
      ]
    : given.prompt;
  try {
    for (const side of shown()) {
      if (side.run && side.run.text) side.messages.push({ role: "assistant", content: side.run.text });
      side.messages.push({ role: "user", content });
      side.run = null;
    }
    const bodies = shown().map(bodyOf);
    shown().forEach((side, at) => void run(app, side, bodies[at]));
    given.prompt = "";
  } catch (error) {
    for (const side of shown()) side.messages.pop();
    given.problem = error.message;
  }
  app.draw();
}

async function run(app, side, body) {
  const now = {
    body,
    abort: new AbortController(),
    startedAt: performance.now(),
    firstAt: null,
    endedAt: null,
    status: null,
    requestId: null,
    text: "",
    reasoning: "",
    tokens: [],
    calls: [],
    finish: null,
    usage: null,
    raw: "",
    isCut: false,
    problem: null,
  };
  side.run = now;
  try {
    const response = await app.api.open(CHAT, {
      method: "POST",
      key: given.key.trim(),
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: now.abort.signal,
    });
    now.status = response.status;
    now.requestId = response.headers.get("x-request-id");
    await readEvents(response, (event) => {
      keep(now, event);
      app.draw();
    });
  } catch (error) {
    now.status ??= error.status ?? null;
    now.problem = now.abort.signal.aborted ? "stopped here" : error.message;
  }
  now.endedAt = performance.now();
  app.draw();
}

function keep(now, { event, data }) {
  if (now.raw.length < MAX_RAW) now.raw += `${event === "message" ? "" : `event: ${event}\n`}data: ${data}\n\n`;
  else now.isCut = true;
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (event === "error" || chunk.error) {
    now.problem = chunk.error?.message ?? chunk.message ?? "the server ended the stream with an error";
    return;
  }
  if (chunk.usage) now.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta = {}, logprobs, finish_reason: finish } = choice;
  if (now.firstAt === null && (delta.content || delta.reasoning_content || delta.tool_calls))
    now.firstAt = performance.now();
  now.text += delta.content ?? "";
  now.reasoning += delta.reasoning_content ?? "";
  for (const token of logprobs?.content ?? [])
    now.tokens.push({ token: token.token, logprob: token.logprob, top: token.top_logprobs ?? [] });
  for (const call of delta.tool_calls ?? []) {
    const known = (now.calls[call.index] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (finish) now.finish = finish;
}
