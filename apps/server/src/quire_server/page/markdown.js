/**
 * Markdown as elements, also while it is still being written.
 *
 * Text of a model becomes text nodes and elements that are made here, never markup. While an answer streams, blocks
 * that can no longer change are left alone: each drawing parses and compares only what stands behind them.
 */

import { CodeView } from "./code.js";
import { parseBlocks } from "./blocks.js";
import { make, morph } from "./dom.js";
import { parseInline } from "./inline.js";
import { formula } from "./math.js";

const MAX_CHARS = 250_000;
/** What follows is shown as it is: no answer is so long that it is worth a page that stands still. */
const MAX_INLINE_CHARS = 100_000;
/** Longer paragraphs are shown as they are. */

/** An element that shows a growing text as Markdown. */
export class MarkdownView {
  constructor() {
    this.element = make("div.markdown");
    this.text = "";
    /** Where the part begins that may still change. */
    this.settled = 0;
    /** Elements of the settled part. */
    this.numSettled = 0;
    /** @type {WeakMap<Node, {tight: boolean, sources: string[]}>} A list -> what its items were made of. */
    this.lists = new WeakMap();
    /** @type {Map<number, CodeView>} Place of a block among all -> its code, which grows in place. */
    this.codes = new Map();
  }

  /**
   * @param {string} text  Whole text so far.
   * @param {boolean} [isWhole]  Whether nothing will follow.
   */
  show(text, isWhole = true) {
    if (!text.startsWith(this.text.slice(0, this.settled))) {
      this.settled = this.numSettled = 0;
      this.codes.clear();
      this.element.replaceChildren();
    }
    this.text = text;
    const rest = text.slice(this.settled, MAX_CHARS);
    const blocks = parseBlocks(isWhole || text.length > MAX_CHARS ? rest : withMarksClosed(rest));
    if (text.length > MAX_CHARS) blocks.push({ type: "plain", text: text.slice(MAX_CHARS) });
    const codes = new Map();
    blocks.forEach((block, index) => {
      const place = this.numSettled + index;
      if (block.type === "list") this.#grow(block, place);
      else this.#place(this.#node(block, place, codes, isWhole), place);
    });
    while (this.element.childNodes.length > this.numSettled + blocks.length) this.element.lastChild.remove();
    this.codes = codes;
    if (!isWhole) this.#settle(rest, blocks);
  }

  #place(node, index) {
    const there = this.element.childNodes[index];
    if (there === node) return;
    if (!there) this.element.append(node);
    else if (node.nodeName === "FIGURE") there.replaceWith(node);  // code keeps its own element
    else morph(there, node);
  }

  /** Show a list where one stands already, making only those items anew that changed. */
  #grow(block, place) {
    const element = this.element.childNodes[place], sources = block.items.map((item) => `${item.task} ${item.source}`);
    const before = element && this.lists.get(element);
    const isSame = before && before.tight === block.tight && element.nodeName === (block.ordered ? "OL" : "UL") && element.childElementCount === before.sources.length;
    if (isSame && before.sources.length <= sources.length) {
      block.items.forEach((item, index) => {
        if (before.sources[index] === sources[index]) return;
        const there = element.children[index], node = listItem(item, block.tight);
        if (there) morph(there, node); else element.append(node);
      });
    } else {
      this.#place(list(block), place);
    }
    this.lists.set(this.element.childNodes[place], { tight: block.tight, sources });
  }

  #node(block, place, codes, isWhole) {
    if (block.type !== "code") return blockNode(block);
    let view = this.codes.get(place);
    if (view?.language !== block.language) view = new CodeView(block.language);
    view.show(block.text, isWhole || block.closed);
    codes.set(place, view);
    return view.element;
  }

  /** Blocks before the last one are settled, once the line that ended them is whole. */
  #settle(rest, blocks) {
    const lastBreak = rest.lastIndexOf("\n");
    if (lastBreak < 0) return;
    const lines = rest.slice(0, lastBreak).split("\n");
    const last = blocks.findLastIndex((block) => block.line < lines.length);  // what is plain has no line
    if (last <= 0) return;
    let offset = 0;
    for (let line = 0; line < blocks[last].line; line += 1) offset += lines[line].length + 1;
    this.settled += offset;
    this.numSettled += last;
  }
}

/** @param {string} text @returns {HTMLElement} */
export function markdown(text) {
  const view = new MarkdownView();
  view.show(text);
  return view.element;
}

/**
 * Close bold and code that the last line has opened, so that their marks do not flash up while the text is written.
 * @param {string} text
 */
function withMarksClosed(text) {
  const start = text.lastIndexOf("\n") + 1, line = text.slice(start);
  if (line.length > 2000 || /^\s*(?:```|~~~)/.test(line) || (text.match(/^ {0,3}(?:```|~~~)/gm)?.length ?? 0) % 2) return text;
  const ticks = line.split("`").length - 1;
  if (ticks % 2) return /`$/.test(line) ? text.slice(0, -1) : `${text}\``;
  const bare = line.replace(/`[^`]*`/g, "");
  if ((bare.match(/\*\*/g)?.length ?? 0) % 2 === 0) return text;
  return line.endsWith("**") ? text.slice(0, -2) : `${text.replace(/[\s*]+$/, "")}**`;
}

/** @param {import("./blocks.js").Block} block @returns {Node} */
function blockNode(block) {
  switch (block.type) {
    case "heading": return filled(make(`h${Math.min(6, block.level + 1)}`), block.text);
    case "code": { const view = new CodeView(block.language); view.show(block.text, true); return view.element; }
    case "math": return formula(block.text, true);
    case "quote": return make("blockquote", {}, block.blocks.map(blockNode));
    case "list": return list(block);
    case "table": return table(block);
    case "rule": return make("hr");
    case "plain": return make("p.plain", {}, block.text);
    default: return filled(make("p"), block.text);
  }
}

/** @param {import("./blocks.js").Item} item @param {boolean} isTight */
function listItem(item, isTight) {
  const content = item.blocks.flatMap((inner) =>
    isTight && inner.type === "paragraph" ? [...filled(document.createDocumentFragment(), inner.text).childNodes] : [blockNode(inner)]);
  if (item.task === null) return make("li", {}, content);
  const box = make("input", { type: "checkbox", disabled: true, "aria-label": item.task ? "done" : "to do" });
  if (item.task) box.setAttribute("checked", "");
  return make("li.task", {}, box, " ", content);
}

function list(block) {
  const items = block.items.map((item) => listItem(item, block.tight));
  if (!block.ordered) return make("ul", {}, items);
  const element = make("ol", {}, items);
  if (block.first !== 1) element.setAttribute("start", String(block.first));
  return element;
}

function table(block) {
  const cell = (tag, text, column) => {
    const element = filled(make(tag), text);
    if (tag === "th") element.setAttribute("scope", "col");
    if (block.aligns[column]) element.classList.add(block.aligns[column]);
    return element;
  };
  const head = make("thead", {}, make("tr", {}, ...block.header.map((text, column) => cell("th", text, column))));
  const rows = block.rows.map((row) => make("tr", {}, ...row.map((text, column) => cell("td", text, column))));
  const whole = make("table", {}, head, make("tbody", {}, rows));
  return make("div.table", { tabindex: "0", role: "region", "aria-label": "Table" }, whole);
}

/** @template {ParentNode & Node} T @param {T} parent @param {string} text @returns {T} */
function filled(parent, text) {
  const nodes = text.length > MAX_INLINE_CHARS ? [text] : parseInline(text).map(inlineNode);
  for (const node of nodes) parent.append(node);
  return parent;
}

/** @param {import("./inline.js").Inline} inline @returns {Node|string} */
function inlineNode(inline) {
  if (typeof inline === "string") return inline;
  switch (inline.type) {
    case "strong": return make("strong", {}, inline.children.map(inlineNode));
    case "emphasis": return make("em", {}, inline.children.map(inlineNode));
    case "strike": return make("s", {}, inline.children.map(inlineNode));
    case "code": return make("code", {}, inline.text);
    case "math": return formula(inline.text, inline.display);
    case "image": return make("img", { src: inline.url, alt: inline.text });
    case "break": return make("br");
    default: {
      const attributes = { href: inline.url, target: "_blank", rel: "noopener noreferrer nofollow" };
      return make("a", inline.title ? { ...attributes, title: inline.title } : attributes, inline.children.map(inlineNode));
    }
  }
}
