// Values as text: numbers with units and thousands separators, ages, times. What is not known is "-".

export const UNKNOWN = "-";

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const hundredths = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

/** A count: 6,210. */
export function count(value) {
  return isKnown(value) ? whole.format(value) : UNKNOWN;
}

/** A figure that may be small: 0.04, 41.2, 6,210. */
export function figure(value) {
  if (!isKnown(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0 || size >= 100) return whole.format(value);
  return (size >= 10 ? tenths : hundredths).format(value);
}

/** A share of one as per cent: 84 %, 0.02 %. */
export function share(value) {
  if (!isKnown(value)) return UNKNOWN;
  const percent = value * 100;
  if (percent === 0 || percent >= 10) return `${whole.format(percent)} %`;
  return `${(percent >= 1 ? tenths : hundredths).format(percent)} %`;
}

/** A duration in seconds: 84 ms, 1.24 s, 41 s, 3m 05s, 2h 05m, 3d 4h. */
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  if (seconds < 0) return "0 s";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 10) return `${hundredths.format(seconds)} s`;
  if (seconds < 60) return `${tenths.format(seconds)} s`;
  const two = (value) => String(value).padStart(2, "0");
  const total = Math.floor(seconds);
  if (total < 3600) return `${Math.floor(total / 60)}m ${two(total % 60)}s`;
  if (total < 86400) return `${Math.floor(total / 3600)}h ${two(Math.floor((total % 3600) / 60))}m`;
  return `${Math.floor(total / 86400)}d ${Math.floor((total % 86400) / 3600)}h`;
}

/** The age of a time in whole seconds where it is short: 0 s, 41 s, 3m 05s. */
export function age(atMs, nowMs) {
  if (!isKnown(atMs) || !isKnown(nowMs)) return UNKNOWN;
  const seconds = Math.max(0, (nowMs - atMs) / 1000);
  return seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds);
}

/** Bytes: 512 B, 1.4 MB. */
export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  let size = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${unit === "B" ? whole.format(size) : tenths.format(size)} ${unit}`;
    size /= 1000;
  }
  return `${tenths.format(size)} TB`;
}

/** The time of day: 12:03:41. */
export function clock(atMs) {
  return isKnown(atMs) && atMs > 0 ? new Date(atMs).toTimeString().slice(0, 8) : UNKNOWN;
}

/** A day and a time: 2026-11-23 12:03:41. */
export function moment(atMs) {
  if (!isKnown(atMs) || atMs <= 0) return UNKNOWN;
  const at = new Date(atMs);
  const two = (value) => String(value).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(atMs)}`;
}

/** How many rows of how many: "100 of 3,412"; the count alone where all are here. */
export function sampled(shown, total) {
  return total !== undefined && total > shown ? `${count(shown)} of ${count(total)}` : count(shown);
}

/** Two figures as one cell: 1,904/4,096; "-" where the first is not known. */
export function ratio(part, all) {
  if (!isKnown(part)) return UNKNOWN;
  return isKnown(all) ? `${count(part)}/${count(all)}` : count(part);
}

/** Any value that a client may have made, as one line: control and direction characters become visible escapes. */
export function line(value) {
  if (value === null || value === undefined || value === "") return UNKNOWN;
  const text = typeof value === "string" ? value : typeof value === "object" ? JSON.stringify(value) : String(value);
  return visible(text.replace(/[\r\n\t]+/g, " "));
}

/** The same, with its lines and tabs. */
export function lines(value) {
  return visible(String(value ?? ""));
}

// Controls, and the characters that turn the direction of text around: they could make one name look like another.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Text as it may be shown: what would paint nothing, or turn the text around, becomes an escape. Lines and tabs stay. */
export function visible(text) {
  return text.replace(HIDDEN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** The end of an id, to recognise it by. */
export function tail(id, length = 4) {
  return String(id).slice(-length);
}

/** Rows of cells as aligned text for a ticket; `rights[i]` tells whether column i is aligned to the right. */
export function columnsText(rows, rights = []) {
  const widths = [];
  for (const row of rows) row.forEach((cell, at) => (widths[at] = Math.max(widths[at] ?? 0, cell.length)));
  return rows
    .map((row) =>
      row
        .map((cell, at) => (rights[at] ? cell.padStart(widths[at]) : cell.padEnd(widths[at])))
        .join("  ")
        .trimEnd(),
    )
    .join("\n");
}

/** Names and values as aligned lines. */
export function pairsText(pairs) {
  return columnsText(pairs.map(([name, value]) => [name, line(value)]));
}
