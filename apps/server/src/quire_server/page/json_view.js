/** A JSON value as a tree whose branches fold. */

import { make } from "./dom.js";

const MAX_ENTRIES = 500;
const OPEN_DEPTH = 2;
const MAX_DEPTH = 60;

/**
 * @param {string} text
 * @returns {HTMLElement|null} null where the text is no JSON object or list.
 */
export function jsonView(text) {
  const start = text.trimStart()[0];
  if (start !== "{" && start !== "[") return null;
  try {
    return make("div.json", {}, branch(JSON.parse(text), null, 0));
  } catch {
    return null;
  }
}

/** @param {any} value @param {string|null} name @param {number} depth @returns {HTMLElement} */
function branch(value, name, depth) {
  const label = name === null ? null : make("span.key", {}, name);
  if (value === null || typeof value !== "object") {
    const kind = value === null ? "literal" : { string: "string", number: "number" }[typeof value] ?? "literal";
    return make("div.leaf", {}, label, label && ": ", make(`span.${kind}`, {}, JSON.stringify(value)));
  }
  const entries = Array.isArray(value) ? value.map((each, index) => [String(index), each]) : Object.entries(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (!entries.length) return make("div.leaf", {}, label, label && ": ", `${open}${close}`);
  const count = `${open} ${entries.length} ${entries.length === 1 ? "entry" : "entries"} ${close}`;
  const details = make("details", {}, make("summary", {}, label, label && ": ", make("span.count", {}, count)));
  const fill = () => {
    if (details.childElementCount > 1) return;
    const shown = entries.slice(0, MAX_ENTRIES).map(([key, each]) => (depth < MAX_DEPTH ? branch(each, key, depth + 1) : make("div.leaf", {}, key, ": ", JSON.stringify(each))));
    const more = entries.length - shown.length;
    details.append(make("div.branch", {}, ...shown, more > 0 && make("div.leaf", {}, `… ${more} more`)));
  };
  details.addEventListener("toggle", fill);  // branches are made when they are opened
  if (depth < OPEN_DEPTH && entries.length <= 50) {
    details.open = true;
    fill();
  }
  return details;
}
