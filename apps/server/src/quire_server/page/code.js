/** A block of code with its language and a button that copies it; it grows without being drawn anew. */

import { copyText, flashDone, iconButton, make } from "./dom.js";
import { highlight, languageOf } from "./highlight.js";

const MAX_COLOURED_CHARS = 200_000;

export class CodeView {
  /** @param {string} language  As it stands behind the fence. */
  constructor(language) {
    this.language = language;
    this.text = "";
    /** Characters whose colours are final. */
    this.settled = 0;
    /** Nodes that show them. */
    this.numSettled = 0;
    this.isWhole = false;
    this.code = make("code");
    const label = make("span.language", {}, language || "text");
    const copy = iconButton("copy", "Copy code", copyCode);
    this.element = make("figure.code", {}, make("figcaption", {}, label, copy), make("pre", { tabindex: "0" }, this.code));
  }

  /**
   * @param {string} text
   * @param {boolean} isWhole  Whether nothing will follow.
   */
  show(text, isWhole) {
    if (text === this.text && isWhole === this.isWhole && this.code.firstChild) return;
    if (!text.startsWith(this.text.slice(0, this.settled))) {
      this.settled = this.numSettled = 0;
      this.code.replaceChildren();
    }
    this.text = text;
    this.isWhole = isWhole;
    while (this.code.childNodes.length > this.numSettled) this.code.lastChild.remove();
    const name = text.length > MAX_COLOURED_CHARS ? null : languageOf(this.language);
    const rest = text.slice(this.settled);
    if (name === null) {
      this.code.append(rest);
      this.settled = text.length;
      this.numSettled = this.code.childNodes.length;
      return;
    }
    const tokens = highlight(rest, name);
    for (const { kind, text: piece } of tokens) this.code.append(kind ? make(`span.${kind}`, {}, piece) : piece);
    if (!isWhole) this.#settle(tokens);
  }

  /** Tokens before the last plain one with a line break are final: what follows begins a line of its own. */
  #settle(tokens) {
    const last = tokens.findLastIndex(({ kind, text }, index) => kind === "" && text.includes("\n") && index < tokens.length - 1);
    if (last < 0) return;
    this.settled += tokens.slice(0, last + 1).reduce((sum, { text }) => sum + text.length, 0);
    this.numSettled += last + 1;
  }
}

/** @param {Event} event */
async function copyCode(event) {
  const button = /** @type {HTMLElement} */ (event.currentTarget);
  const code = button.closest("figure")?.querySelector("code");
  if (await copyText(code?.textContent ?? "")) flashDone(button, "copy");
}
