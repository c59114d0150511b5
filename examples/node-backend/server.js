// A worker in plain Node.js (18+), with no package: it serves the sample engine's behaviour over the mux wire
// (docs/wire.md) and registers itself with file discovery. Start it beside a frontend:
//
//   DYN_FILE_KV=/tmp/store node server.js --model-name node-model
//   DYN_FILE_KV=/tmp/store python -m dynamo.frontend --discovery-backend file --http-port 8000
"use strict";
const crypto = require("node:crypto");
const fs = require("node:fs");
const net = require("node:net");
const os = require("node:os");
const path = require("node:path");

// -- settings ---------------------------------------------------------------------------------------------------------

function flag(name, fallback) {
  const at = process.argv.indexOf(`--${name}`);
  return at < 0 ? fallback : process.argv[at + 1];
}
const MODEL = flag("model-name", "node-model");
const [NAMESPACE, COMPONENT, ENDPOINT] = [flag("namespace", "dynamo"), flag("component", "node"), "generate"];
const DEFAULT_TOKENS = Number(flag("max-tokens", 16));
const DELAY_MS = 1000 * Number(flag("delay", 0.01));
const STORE = process.env.DYN_FILE_KV || path.join(os.tmpdir(), "dynamo_store_kv");
const GRACE_MS = 1000 * Number(process.env.DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS || 5);

// -- msgpack: as much of it as the wire uses ----------------------------------------------------------------------------

function head(small, big, length) { // the shortest header of a string, array or map
  if (length < small.limit) return Buffer.from([small.tag | length]);
  const long = length > 0xffff;
  const bytes = Buffer.alloc(long ? 5 : 3);
  bytes[0] = long ? big + 1 : big;
  long ? bytes.writeUInt32BE(length, 1) : bytes.writeUInt16BE(length, 1);
  return bytes;
}
function pack(value) {
  if (value === null || value === undefined) return Buffer.from([0xc0]);
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "number") {
    if (Number.isInteger(value) && value >= -32 && value < 128) return Buffer.from([value & 0xff]);
    const whole = Number.isInteger(value) && value >= 0 && value <= 0xffffffff;
    const bytes = Buffer.alloc(whole ? 5 : 9);
    bytes[0] = whole ? 0xce : 0xcb;
    whole ? bytes.writeUInt32BE(value, 1) : bytes.writeDoubleBE(value, 1);
    return bytes;
  }
  if (typeof value === "string") {
    const text = Buffer.from(value);
    return Buffer.concat([head({ limit: 32, tag: 0xa0 }, 0xda, text.length), text]);
  }
  if (Array.isArray(value)) return Buffer.concat([head({ limit: 16, tag: 0x90 }, 0xdc, value.length), ...value.map(pack)]);
  const entries = Object.entries(value);
  return Buffer.concat([head({ limit: 16, tag: 0x80 }, 0xde, entries.length), ...entries.flat().map(pack)]);
}
function unpack(bytes) {
  let at = 0;
  const take = (n) => { if ((at += n) > bytes.length) throw new Error("truncated msgpack"); return at - n; };
  const many = (n) => Array.from({ length: n }, () => read());
  const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [read(), read()]));
  const text = (n) => bytes.toString("utf8", take(n), at);
  const uint = (n) => bytes.readUIntBE(take(n), n);
  function read() {
    const tag = bytes[take(1)];
    if (tag < 0x80) return tag;
    if (tag < 0x90) return map(tag & 15);
    if (tag < 0xa0) return many(tag & 15);
    if (tag < 0xc0) return text(tag & 31);
    if (tag >= 0xe0) return tag - 256;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return bytes.subarray(take(uint(1 << (tag - 0xc4))), at); // bin
      case 0xca: return bytes.readFloatBE(take(4));
      case 0xcb: return bytes.readDoubleBE(take(8));
      case 0xcc: case 0xcd: case 0xce: return uint(1 << (tag - 0xcc));
      case 0xcf: return Number(bytes.readBigUInt64BE(take(8)));
      case 0xd0: case 0xd1: case 0xd2: { const n = 1 << (tag - 0xd0); return bytes.readIntBE(take(n), n); }
      case 0xd3: return Number(bytes.readBigInt64BE(take(8)));
      case 0xd9: case 0xda: case 0xdb: return text(uint(1 << (tag - 0xd9)));
      case 0xdc: case 0xdd: return many(uint(2 << (tag - 0xdc)));
      case 0xde: case 0xdf: return map(uint(2 << (tag - 0xde)));
      default: throw new Error(`msgpack tag ${tag} is not used on this wire`);
    }
  }
  return read();
}

// -- the wire (docs/wire.md) --------------------------------------------------------------------------------------------

const MAGIC = Buffer.from("\xffDYNMUX\n", "latin1");
const KIND = { HELLO: 1, PING: 2, PONG: 3, GOAWAY: 4, OPEN: 5, BODY: 6, CANCEL: 7, CREDIT: 8, ITEMS: 9, ITEM_PART: 10, ERROR: 11 };
const [END, WINDOW, MAX_PAYLOAD, MAX_BODY, HELLO_MS] = [-2, 1024, 65536, 32 << 20, 10_000];
const connections = new Set();

class Connection {
  constructor(socket) {
    Object.assign(this, { socket, buffer: Buffer.alloc(0), greeted: false, window: WINDOW, out: [], streams: new Map() });
    connections.add(this);
    socket.setNoDelay(true);
    socket.setTimeout(90_000, () => socket.destroy()); // callers ping every 20 s
    const greeting = setTimeout(() => { if (!this.greeted) this.fail("no HELLO within 10 s"); }, HELLO_MS);
    socket.on("data", (data) => { try { this.feed(data); } catch (error) { this.fail(error.message); } });
    socket.on("error", () => {}); // "close" follows, and a caller that left is an ordinary event
    socket.on("close", () => { // a lost caller is a kill of all its streams
      clearTimeout(greeting);
      connections.delete(this);
      for (const stream of this.streams.values()) stream.kill();
    });
  }
  feed(data) {
    this.buffer = Buffer.concat([this.buffer, data]);
    if (!this.sawMagic) {
      if (this.buffer.length < MAGIC.length) return;
      if (!this.buffer.subarray(0, MAGIC.length).equals(MAGIC)) throw new Error("this worker speaks mux only");
      this.buffer = this.buffer.subarray(MAGIC.length);
      this.sawMagic = true;
    }
    while (this.buffer.length >= 12) {
      const length = this.buffer.readUInt32BE(0);
      if (length > MAX_PAYLOAD) throw new Error(`a frame of ${length} bytes`);
      if (this.buffer.length < 12 + length) return;
      const [kind, flags, id] = [this.buffer[4], this.buffer[5], this.buffer.readUInt32BE(8)];
      const payload = this.buffer.subarray(12, 12 + length);
      this.buffer = this.buffer.subarray(12 + length);
      this.onFrame(kind, flags, id, payload);
    }
  }
  onFrame(kind, flags, id, payload) {
    if (!this.greeted) {
      if (kind !== KIND.HELLO) throw new Error("the first frame must be HELLO");
      const hello = unpack(payload);
      if (!Number.isInteger(hello?.version) || hello.version < 1) throw new Error("HELLO needs a version, 1 or higher");
      this.greeted = true;
      this.window = hello.credits ?? WINDOW;
      return this.frame(KIND.HELLO, pack({ version: 1, capabilities: ["deadline", "credits", "fragments"], agent: "node-backend" }));
    }
    const stream = this.streams.get(id);
    if (kind === KIND.PING) this.frame(KIND.PONG, payload);
    else if (kind === KIND.CANCEL) payload[0] ? stream?.kill() : stream?.stop();
    else if (kind === KIND.CREDIT) for (const [target, amount] of unpack(payload)) this.streams.get(target)?.grant(amount);
    else if (kind === KIND.ERROR) this.socket.destroy();
    else if (kind === KIND.OPEN) {
      const [request, body] = unpack(payload);
      if (id === 0 || stream) throw new Error(`stream id ${id} is reserved or in use`);
      if (typeof request?.path !== "string" || typeof request.id !== "string") throw new Error("OPEN needs path and id, two texts");
      const opened = new Stream(this, id, request);
      this.streams.set(id, opened);
      if (body !== null) opened.start(body);
      else if (request.size > MAX_BODY) opened.end(failure("InvalidArgument", "the request body is too large"));
      else opened.parts = [];
    } else if (kind === KIND.BODY && stream?.parts) {
      stream.parts.push(Buffer.from(payload));
      if (!(flags & 1)) return;
      const body = Buffer.concat(stream.parts);
      if (body.length !== stream.request.size) throw new Error(`stream ${id} sent ${body.length} bytes, not the ${stream.request.size} it announced`);
      stream.start(body);
    }
  }
  frame(kind, payload, id = 0, flags = 0) {
    const header = Buffer.alloc(12);
    header.writeUInt32BE(payload.length, 0);
    header[4] = kind;
    header[5] = flags;
    header.writeUInt32BE(id, 8);
    if (this.socket.writable) this.socket.write(Buffer.concat([header, payload]));
  }
  send(item) { // everything of one turn of the event loop leaves in one frame
    if (this.out.push(item) === 1) setImmediate(() => this.flush(this.out.splice(0)));
  }
  flush(items) { // in halves where they do not fit in a frame, and one that does not fit alone in parts
    const payload = pack(items);
    if (payload.length <= MAX_PAYLOAD) return this.frame(KIND.ITEMS, payload);
    const half = items.length >> 1;
    if (half) { this.flush(items.slice(0, half)); return this.flush(items.slice(half)); }
    const whole = pack(items[0]);
    for (let at = 0; at < whole.length; at += MAX_PAYLOAD)
      this.frame(KIND.ITEM_PART, whole.subarray(at, at + MAX_PAYLOAD), items[0][0], at + MAX_PAYLOAD >= whole.length ? 1 : 0);
  }
  fail(message) {
    this.frame(KIND.ERROR, pack({ message }));
    this.socket.end();
  }
}

const failure = (kind, message) => ({
  error_type: kind.startsWith("Worker") ? kind : { Backend: kind },
  message,
  ...(kind === "InvalidArgument" ? { public: { type: "message", message } } : {}), // without it the client sees a generic text
});

class Stream { // one request: its credit, and whether its caller still wants it
  constructor(connection, id, request) {
    Object.assign(this, { connection, id, request, credit: connection.window, sent: 0, stopped: false, killed: false, ended: false });
    if (request.deadline_ms) this.timer = setTimeout(() => this.end(failure("ResponseTimeout", "the request's deadline passed")), request.deadline_ms);
  }
  start(body) {
    this.parts = null;
    if (this.request.path !== ROUTE) return this.end(failure("WorkerUnavailable", `Server unavailable: unknown endpoint ${this.request.path}`));
    let decoded;
    try { decoded = unpack(body); } catch (error) { return this.end(failure("InvalidArgument", `the request body is not msgpack: ${error.message}`)); }
    generate(decoded, this).then(() => this.end(), (error) => this.end(failure(error.kind ?? "Unknown", error.message)));
  }
  async tokens(ids, finish = null, extra = null) {
    while (this.credit <= 0 && !this.killed) await new Promise((resolve) => { this.wake = resolve; });
    if (this.killed || this.ended) return;
    this.connection.send([this.id, 0, this.sent, ids, finish, extra]);
    this.sent += ids.length;
    this.credit -= Math.max(1, ids.length);
  }
  end(error = null) {
    if (this.ended) return;
    this.ended = true;
    clearTimeout(this.timer);
    this.connection.streams.delete(this.id);
    if (!this.killed) this.connection.send([this.id, END, this.sent, [], null, error]);
    if (stopping && !busy()) leave();
  }
  grant(amount) { this.credit += amount; this.wake?.(); }
  stop() { this.stopped = true; }
  kill() { this.stopped = this.killed = true; this.wake?.(); this.end(); }
}

// -- the engine: rotating token ids, one every DELAY_MS -----------------------------------------------------------------

async function generate(request, stream) {
  if (!Array.isArray(request?.token_ids)) throw Object.assign(new Error("the request has no token_ids"), { kind: "InvalidArgument" });
  const [prompt, total] = [request.token_ids.length, request.stop_conditions?.max_tokens || DEFAULT_TOKENS];
  const usage = (made) => ({ completion_usage: { prompt_tokens: prompt, completion_tokens: made, total_tokens: prompt + made } });
  for (let i = 0; i < total; i++) {
    if (stream.stopped) return stream.tokens([], "cancelled", usage(i));
    await new Promise((resolve) => setTimeout(resolve, DELAY_MS));
    const last = i === total - 1;
    await stream.tokens([(i + 1) % 32000], last ? "length" : null, last ? usage(total) : null);
  }
}

// -- discovery: one file per record, touched every 3 s, removed when we leave -------------------------------------------

const INSTANCE = crypto.randomBytes(6).readUIntBE(0, 6); // 48 bits: a number that JavaScript keeps exact
const ROUTE = `${INSTANCE.toString(16)}/${NAMESPACE}/${COMPONENT}/${ENDPOINT}`;
const KEY = `${NAMESPACE}/${COMPONENT}/${ENDPOINT}/${INSTANCE.toString(16)}`;
const fileName = [...Buffer.from(KEY)].map((b) => /[A-Za-z0-9]/.test(String.fromCharCode(b)) ? String.fromCharCode(b) : `%${b.toString(16).toUpperCase().padStart(2, "0")}`).join("");
const files = new Map();

function publish(bucket, record) {
  const directory = path.join(STORE, bucket);
  fs.mkdirSync(directory, { recursive: true });
  const [temporary, target] = [path.join(directory, `.tmp_${process.pid}_${fileName}`), path.join(directory, fileName)];
  fs.writeFileSync(temporary, JSON.stringify(record));
  fs.renameSync(temporary, target);
  files.set(target, () => publish(bucket, record));
}
function keepAlive() {
  for (const [target, again] of files) try { fs.utimesSync(target, new Date(), new Date()); } catch { again(); } // expired while we slept
}

// -- life -----------------------------------------------------------------------------------------------------------------

let stopping = false;
const busy = () => [...connections].some((connection) => connection.streams.size > 0);
const leave = () => setImmediate(() => { for (const connection of connections) connection.socket.end(); server.close(); setTimeout(() => process.exit(0), 200); });
const server = net.createServer((socket) => new Connection(socket));
server.listen(Number(process.env.DYN_TCP_RPC_PORT || 0), process.env.DYN_TCP_RPC_HOST || "127.0.0.1", () => {
  const { address, port } = server.address();
  const where = { namespace: NAMESPACE, component: COMPONENT, endpoint: ENDPOINT, instance_id: INSTANCE };
  publish("v1/instances", { type: "Endpoint", ...where, transport: { tcp: `${address}:${port}/${ROUTE}` }, device_type: "cpu", request_plane_codec: "msgpack", mux: 1 });
  publish("v1/mdc", { type: "Model", ...where, card_json: {
    display_name: MODEL, slug: MODEL.toLowerCase().replace(/[^a-z0-9_-]/g, "_"), source_path: MODEL, context_length: 2048, kv_cache_block_size: 16,
    migration_limit: 0, model_type: "Chat | Completions", model_input: "Tokens", worker_type: "aggregated", needs: [], runtime_config: {},
  } });
  setInterval(keepAlive, 3000);
  console.log(`Serving ${MODEL} on ${NAMESPACE}.${COMPONENT}.${ENDPOINT} at ${address}:${port}`);
});
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => {
  if (stopping) return;
  stopping = true;
  for (const target of files.keys()) fs.rmSync(target, { force: true });
  files.clear();
  setTimeout(() => { // callers that have not heard yet are still served
    for (const connection of connections) connection.frame(KIND.GOAWAY, pack({ reason: "shutting down" }));
    if (!busy()) leave();
  }, GRACE_MS);
});
