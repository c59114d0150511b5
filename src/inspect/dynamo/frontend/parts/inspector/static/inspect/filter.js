// The filter language, as the server's API has it too: `model:demo age>30 stalled !key:batch 52a1`.
// All terms must hold; `!` turns one around; a word that is no mark is a part of an id (or of a text, where a view has no ids).

const PART = /(?:"[^"]*"|[^\s"])+/g;
const COMPARED = /^([a-z]+)(>=|<=|>|<|=)(.*)$/s;
const NAMED = /^([a-z_]+):(.*)$/s;
const NUMBER = /^(-?[0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|m|h|k)?$/;
const UNITS = { ms: 0.001, s: 1, m: 60, h: 3600 };
const COMPARISONS = {
  ">": (a, b) => a > b,
  "<": (a, b) => a < b,
  ">=": (a, b) => a >= b,
  "<=": (a, b) => a <= b,
  "=": (a, b) => a === b,
};
const MAX_TERMS = 32;

/**
 * What rows can be filtered by:
 * `texts`: {name: (row) => text, list of texts or null}, `figures` and `durations`: {name: (row, now) => number or null},
 * `marks`: {name: (row) => boolean}, `beginnings`: names of texts whose beginning is enough, `words`: (row) => texts that a
 * word alone may be a part of.
 */
export const NOTHING = { texts: {}, figures: {}, durations: {}, marks: {}, beginnings: [], words: () => [] };

/** Read a filter. Returns {matches(row, now), problem}: `problem` says what is not understood, and then every row matches. */
export function compile(text, what) {
  try {
    if ((text.match(/"/g) ?? []).length % 2) throw new Problem('a double quote (") is not closed');
    const parts = text.match(PART) ?? [];
    if (parts.length > MAX_TERMS) throw new Problem(`it has ${parts.length} terms, and ${MAX_TERMS} are read`);
    const tests = parts.map((part) => term(part, { ...NOTHING, ...what }));
    return { matches: (row, now) => tests.every((test) => test(row, now)), problem: null };
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return { matches: () => true, problem: error.message };
  }
}

class Problem extends Error {}

function term(part, what) {
  const isTurned = part.startsWith("!");
  const body = isTurned ? part.slice(1) : part;
  if (body === "") throw new Problem("a term stands behind `!`");
  const test = positive(body, what);
  return isTurned ? (row, now) => !test(row, now) : test;
}

function positive(body, what) {
  if (!body.startsWith('"')) {
    const compared = COMPARED.exec(body);
    if (compared) return comparison(compared, what);
    const named = NAMED.exec(body);
    if (named) return equality(named, what);
    const mark = own(what.marks, body.toLowerCase());
    if (mark) return (row) => mark(row);
  }
  const wanted = body.replaceAll('"', "").toLowerCase();
  return (row) =>
    what.words(row).some((word) => word !== null && word !== undefined && String(word).toLowerCase().includes(wanted));
}

function own(table, name) {
  return Object.hasOwn(table, name) ? table[name] : undefined;
}

function comparison([, name, sign, written], what) {
  const duration = own(what.durations, name);
  const figure = duration ?? own(what.figures, name);
  if (!figure)
    throw new Problem(
      `${name} is not a figure; there are ${Object.keys({ ...what.durations, ...what.figures }).join(", ") || "none here"}`,
    );
  const found = NUMBER.exec(written);
  if (!found) throw new Problem(`"${written}" behind ${name}${sign} is not a number`);
  let value = Number(found[1]);
  const unit = found[2];
  if (unit === "k" && !duration) value *= 1000;
  else if (unit !== undefined) {
    if (!duration || !(unit in UNITS))
      throw new Problem(
        `${unit} is not a unit of ${name}, which is ${duration ? "a duration (ms, s, m, h)" : "a count (k)"}`,
      );
    value *= UNITS[unit];
  }
  const holds = COMPARISONS[sign];
  return (row, now) => {
    const measured = figure(row, now);
    return measured !== null && measured !== undefined && holds(measured, value);
  };
}

function equality([, name, written], what) {
  const read = own(what.texts, name);
  if (!read)
    throw new Problem(`${name} is not a field; there are ${Object.keys(what.texts).join(", ") || "none here"}`);
  let wanted = written.replaceAll('"', "").toLowerCase();
  if (wanted === "") throw new Problem(`a value stands behind ${name}:`);
  if (what.beginnings.includes(name) && !wanted.endsWith("*")) wanted += "*";
  const pieces = wanted.split("*");
  const fits = pieces.length === 1 ? (value) => value === wanted : (value) => fitsPieces(value, pieces);
  return (row) =>
    [read(row)].flat().some((value) => value !== null && value !== undefined && fits(String(value).toLowerCase()));
}

// Whether a text is the pieces in their order with anything between them; linear, unlike a pattern.
function fitsPieces(text, pieces) {
  const first = pieces[0];
  const last = pieces.at(-1);
  if (!text.startsWith(first) || text.length < first.length + last.length || !text.endsWith(last)) return false;
  let at = first.length;
  const end = text.length - last.length;
  for (const piece of pieces.slice(1, -1)) {
    const found = text.indexOf(piece, at);
    if (found < 0 || found + piece.length > end) return false;
    at = found + piece.length;
  }
  return true;
}

const seconds = (since, now) => (since === null || since === undefined ? null : (now - since) / 1000);
const text = (name) => (row) => row[name];
const isFallback = (row) => row.served_by !== null && row.served_by !== undefined;
const ids = (row) => [row.id, row.client_request_id];

/** By what the server filters streams, requests that have ended, and workers. */
export const STREAMS = {
  texts: {
    id: ids,
    model: (row) => [row.model, row.served_by],
    worker: text("workers"),
    key: text("key"),
    phase: text("phase"),
    endpoint: text("endpoint"),
    frontend: text("frontend"),
  },
  durations: {
    age: (row, now) => seconds(row.started_ms, now),
    wait: text("queued_seconds"),
    ttft: text("ttft_seconds"),
    silent: (row, now) => seconds(row.last_token_ms, now),
  },
  figures: {
    in: text("prompt_tokens"),
    cached: text("cached_tokens"),
    out: text("output_tokens"),
    max: text("max_tokens"),
    rate: text("tokens_per_second"),
    attempt: text("attempt"),
    n: text("choices"),
    priority: text("priority"),
  },
  marks: { stalled: (row) => row.is_stalled, streaming: (row) => row.is_streaming, fallback: isFallback },
  beginnings: ["id", "worker", "endpoint"],
  words: ids,
};

export const RECENT = {
  texts: { ...STREAMS.texts, outcome: text("outcome"), code: text("code"), status: text("status") },
  durations: {
    age: (row) => (row.ended_ms - row.started_ms) / 1000,
    wait: text("queued_seconds"),
    ttft: text("ttft_seconds"),
  },
  figures: {
    in: text("prompt_tokens"),
    cached: text("cached_tokens"),
    out: text("output_tokens"),
    attempt: text("attempts"),
    status: text("status"),
  },
  marks: { failed: (row) => row.outcome !== "ok", fallback: isFallback },
  beginnings: ["id", "worker", "endpoint"],
  words: ids,
};

export const WORKERS = {
  texts: {
    id: text("id"),
    model: text("models"),
    worker: text("id"),
    state: text("state"),
    role: text("role"),
    wire: text("wire"),
    address: text("address"),
  },
  durations: {
    age: (row, now) => seconds(row.since_ms, now),
    wait: text("queue_age_seconds"),
    silent: (row, now) => seconds(row.silent_ms, now),
  },
  figures: {
    running: text("running"),
    queued: text("queued"),
    rate: text("output_tokens_per_second"),
    kv: (row) =>
      row.kv_blocks_used === null || !row.kv_blocks_total ? null : (100 * row.kv_blocks_used) / row.kv_blocks_total,
  },
  marks: { quarantined: (row) => row.state === "quarantined" },
  beginnings: ["id", "worker", "endpoint"],
  words: (row) => [row.id],
};
