// Requests to the server with the viewer's key, and what comes back: values or an ApiError with the server's words.

// What a proxy in front has before the path of this page.
const ROOT = globalThis.location?.pathname.match(/^(.*)\/inspect\//)?.[1] ?? "";

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #key = null;

  get hasKey() {
    return this.#key !== null;
  }

  set key(value) {
    this.#key = value || null;
  }

  /** Return an answer that succeeded; raises ApiError for any other. `init.key` stands for the viewer's own, where it is given. */
  async open(path, { key, ...init } = {}) {
    const used = key || this.#key;
    const headers = { ...init.headers, ...(used ? { authorization: `Bearer ${used}` } : {}) };
    // No cookie is set anywhere; `omit` also keeps a password that a proxy may have asked for out of this page's requests.
    const response = await fetch(ROOT + path, { ...init, headers, credentials: "omit", redirect: "error" });
    if (!response.ok) throw await refusal(response);
    return response;
  }

  async get(path, init = {}) {
    const response = await this.open(path, { cache: "no-store", ...init });
    return response.json();
  }

  async post(path, body, init = {}) {
    const headers = { "content-type": "application/json" };
    const response = await this.open(path, { method: "POST", headers, body: JSON.stringify(body), ...init });
    const text = await response.text();
    return text ? JSON.parse(text) : null;
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const error = typeof body.error === "object" && body.error !== null ? body.error : body;
    return new ApiError(response.status, error.message ?? `the server answered ${response.status}`, error.code ?? null);
  } catch {
    return new ApiError(response.status, `the server answered ${response.status}`);
  }
}

/** Values of paths that are fetched while they are on screen: `use` one in every draw, then `sweep`. */
export class Resources {
  #api;
  #changed;
  #entries = new Map();
  #used = new Set();

  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
  }

  /** Return {value, error, atMs, isLoading}; fetched again every `seconds`, 0: once. */
  use(path, seconds = 0) {
    this.#used.add(path);
    let entry = this.#entries.get(path);
    if (entry === undefined) {
      entry = { value: null, error: null, atMs: null, isLoading: false, seconds };
      this.#entries.set(path, entry);
      this.#fetch(path, entry);
    }
    entry.seconds = seconds;
    return entry;
  }

  /** Fetch this one again now. */
  refresh(path) {
    const entry = this.#entries.get(path);
    if (entry) this.#fetch(path, entry);
  }

  /** Forget what the last draw did not use. */
  sweep() {
    for (const path of this.#entries.keys()) if (!this.#used.has(path)) this.#entries.delete(path);
    this.#used.clear();
  }

  /** Fetch what is due; called once a second. */
  tick() {
    for (const [path, entry] of this.#entries) {
      if (entry.seconds > 0 && !entry.isLoading && Date.now() - entry.atMs >= entry.seconds * 1000)
        this.#fetch(path, entry);
    }
  }

  async #fetch(path, entry) {
    entry.isLoading = true;
    try {
      entry.value = await this.#api.get(path);
      entry.error = null;
    } catch (error) {
      entry.error = error;
    }
    entry.isLoading = false;
    entry.atMs = Date.now();
    this.#changed();
  }
}
