/**
 * The inline part of Markdown: code, emphasis, links, formulas and line breaks of one paragraph, as a tree.
 *
 * Emphasis follows the delimiter algorithm of CommonMark 0.31 (appendix "Phase 2: inline structure"). Every search is
 * bounded or remembered, so that a megabyte of brackets, stars or backticks takes time proportional to its length.
 *
 * @typedef {string
 *   | {type: "strong"|"emphasis"|"strike", children: Inline[]}
 *   | {type: "code", text: string}
 *   | {type: "math", text: string, display: boolean}
 *   | {type: "link", url: string, title: string, children: Inline[]}
 *   | {type: "image", url: string, text: string}
 *   | {type: "break"}} Inline
 */

const MAX_DEPTH = 6;
const MAX_MATH = 2000;
const MAX_OPEN = 100;
/** Runs that may be open at the same time; further ones are text. */
const PUNCTUATION = /[!-/:-@[-`{-~\u2010-\u2027\u3001-\u3003\p{P}\p{S}]/u;
const TARGET = /\(\s*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*))(?:\s+(?:"([^"]*)"|'([^']*)'))?\s*\)/y;
const BARE_URL = /https?:\/\/[^\s<>"`\\]{1,2000}/y;
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BREAK_TAG = /<br\s{0,5}\/?>/iy;
const SAFE_URL = /^(?:https?:|mailto:)/i;
const PICTURE_URL = /^data:image\/(?:png|jpeg|gif|webp);base64,/i;

/**
 * @typedef {{char: string, count: number, canOpen: boolean, canClose: boolean, original: number}} Run
 * @typedef {{inline?: Inline, run?: Run}} Part
 */

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {Inline[]}
 */
export function parseInline(text, depth = 0) {
  return new Scanner(text, depth).parse();
}

/** Whether a link may lead there. @param {string} url */
export function isSafeUrl(url) {
  return SAFE_URL.test(url.trim()) && !/[\u0000-\u001f]/.test(url);
}

class Scanner {
  /** @param {string} text @param {number} depth */
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.place = 0;
    /** @type {Part[]} */
    this.parts = [];
    this.plain = "";
    /** @type {Map<number, number[]>|null} Length of a run of backticks -> places of such runs, ascending. */
    this.ticks = null;
    /** @type {Int32Array|null} Place of a bracket -> place of the one that closes it, 0 for none. */
    this.closings = null;
  }

  /** @returns {Inline[]} */
  parse() {
    const special = /[\\`*_~[!$<\nh]/g;
    while (this.place < this.text.length) {
      special.lastIndex = this.place;
      const found = special.exec(this.text);
      if (!found) break;
      this.plain += this.text.slice(this.place, found.index);
      this.place = found.index;
      if (!this.#special(found[0])) {
        this.plain += this.text[this.place];
        this.place += 1;
      }
    }
    this.plain += this.text.slice(this.place);
    this.#flush();
    return resolved(this.parts);
  }

  #flush() {
    if (this.plain) this.parts.push({ inline: this.plain });
    this.plain = "";
  }

  /** @param {Inline} inline @param {number} next */
  #add(inline, next) {
    this.#flush();
    this.parts.push({ inline });
    this.place = next;
    return true;
  }

  /** Read what begins with a special character; false where it is an ordinary one. @param {string} char */
  #special(char) {
    switch (char) {
      case "\\": return this.#backslash();
      case "`": return this.#code();
      case "*": case "_": case "~": return this.#run(char);
      case "[": return this.depth < MAX_DEPTH && this.#link(this.place, false);
      case "!": return this.text[this.place + 1] === "[" && this.#link(this.place + 1, true);
      case "$": return this.#dollars();
      case "<": return this.#angle();
      case "\n": return this.#newline();
      default: return this.#bareUrl();
    }
  }

  #backslash() {
    const next = this.text[this.place + 1];
    if (next === "(" || next === "[") {
      const end = next === "(" ? "\\)" : "\\]";
      const length = this.text.slice(this.place + 2, this.place + 2 + MAX_MATH).indexOf(end);
      if (length > 0) {
        const start = this.place + 2;
        return this.#add({ type: "math", text: this.text.slice(start, start + length), display: next === "[" }, start + length + 2);
      }
    }
    if (next === "\n") return this.#add({ type: "break" }, this.place + 2);
    if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) {
      this.plain += next;
      this.place += 2;
      return true;
    }
    return false;
  }

  #code() {
    if (this.ticks === null) {
      this.ticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        const places = this.ticks.get(run[0].length);
        if (places) places.push(run.index); else this.ticks.set(run[0].length, [run.index]);
      }
      for (const places of this.ticks.values()) places.reverse();
    }
    let length = 1;
    while (this.text[this.place + length] === "`") length += 1;
    const places = this.ticks.get(length) ?? [];
    while (places.length && places.at(-1) <= this.place) places.pop();
    const end = places.at(-1);
    if (end === undefined) {
      this.plain += "`".repeat(length);
      this.place += length;
      return true;
    }
    let body = this.text.slice(this.place + length, end).replace(/\n/g, " ");
    if (body.startsWith(" ") && body.endsWith(" ") && body.trim()) body = body.slice(1, -1);
    return this.#add({ type: "code", text: body }, end + length);
  }

  /** A run of stars, underscores or tildes, which may open or close emphasis. @param {string} char */
  #run(char) {
    let count = 1;
    while (this.text[this.place + count] === char) count += 1;
    const before = this.text[this.place - 1] ?? " ", after = this.text[this.place + count] ?? " ";
    const spaceBefore = /\s/.test(before), spaceAfter = /\s/.test(after);
    const markBefore = PUNCTUATION.test(before), markAfter = PUNCTUATION.test(after);
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    let [canOpen, canClose] = [left, right];
    if (char === "_") [canOpen, canClose] = [left && (!right || markBefore), right && (!left || markAfter)];
    if (char === "~" && count !== 2) return this.#literal(count);
    if (!canOpen && !canClose) return this.#literal(count);
    this.#flush();
    this.parts.push({ run: { char, count, canOpen, canClose, original: count } });
    this.place += count;
    return true;
  }

  /** @param {number} count */
  #literal(count) {
    this.plain += this.text.slice(this.place, this.place + count);
    this.place += count;
    return true;
  }

  /** @param {number} open  Place of the bracket. @param {boolean} isImage */
  #link(open, isImage) {
    const close = this.#closing(open);
    if (!close || this.text[close + 1] !== "(") return false;
    TARGET.lastIndex = close + 1;
    const found = TARGET.exec(this.text);
    if (!found) return false;
    const label = this.text.slice(open + 1, close);
    const url = (found[1] ?? found[2] ?? "").replace(/\\([!-/:-@[-`{-~])/g, "$1"), title = found[3] ?? found[4] ?? "";
    if (isImage && PICTURE_URL.test(url)) return this.#add({ type: "image", url, text: label }, TARGET.lastIndex);
    const next = TARGET.lastIndex;
    if (!isSafeUrl(url)) return this.#literal(next - this.place);
    const children = parseInline(label || url, MAX_DEPTH);
    return this.#add({ type: "link", url, title, children }, next);
  }

  /** @param {number} open @returns {number} 0 for none. */
  #closing(open) {
    if (this.closings === null) {
      this.closings = new Int32Array(this.text.length);
      const stack = [];
      for (const found of this.text.matchAll(/\\.|[[\]]/gs)) {
        if (found[0] === "[") stack.push(found.index);
        else if (found[0] === "]" && stack.length) this.closings[stack.pop()] = found.index;
      }
    }
    return this.closings[open];
  }

  #dollars() {
    const { text, place } = this;
    if (text[place + 1] === "$") {
      const length = text.slice(place + 2, place + 2 + MAX_MATH).indexOf("$$");
      if (length > 0) return this.#add({ type: "math", text: text.slice(place + 2, place + 2 + length), display: true }, place + length + 4);
      return this.#literal(2);
    }
    if (/\s/.test(text[place + 1] ?? " ")) return false;
    const limit = Math.min(text.length, place + MAX_MATH / 4);
    for (let end = place + 1; end < limit; end += 1) {
      if (text[end] === "\\") { end += 1; continue; }
      if (text[end] === "\n" && text[end + 1] === "\n") break;
      if (text[end] !== "$") continue;
      if (/\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? "")) return false;
      return this.#add({ type: "math", text: text.slice(place + 1, end), display: false }, end + 1);
    }
    return false;
  }

  #angle() {
    BREAK_TAG.lastIndex = ANGLE_URL.lastIndex = this.place;
    if (BREAK_TAG.test(this.text)) return this.#add({ type: "break" }, BREAK_TAG.lastIndex);
    ANGLE_URL.lastIndex = this.place;
    const found = ANGLE_URL.exec(this.text);
    if (!found) return false;
    return this.#add({ type: "link", url: found[1], title: "", children: [found[1].replace(/^mailto:/, "")] }, ANGLE_URL.lastIndex);
  }

  #newline() {
    this.plain = this.plain.trimEnd();
    return this.#add({ type: "break" }, this.place + 1);
  }

  /** An address in running text, without the marks that end its sentence. */
  #bareUrl() {
    if (this.depth === MAX_DEPTH || !this.text.startsWith("http", this.place) || /\w/.test(this.text[this.place - 1] ?? "")) return false;
    BARE_URL.lastIndex = this.place;
    const found = BARE_URL.exec(this.text);
    if (!found) return false;
    let url = found[0].split("**")[0].replace(/[.,;:!?*_'\]}]+$/, "");
    while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1).replace(/[.,;:!?]+$/, "");
    return this.#add({ type: "link", url, title: "", children: [url] }, this.place + url.length);
  }
}

/**
 * Pair the runs.
 * @param {Part[]} parts
 * @returns {Inline[]}
 */
function resolved(parts) {
  /** @type {{children: Inline[], run: Run|null}[]} Open runs, each with what stands behind it; the first is the paragraph. */
  const stack = [{ children: [], run: null }];
  /** @type {Map<string, number>} Kind of closer -> height of the stack below which none of its openers is. */
  const bottoms = new Map();
  const close = (height) => {
    while (stack.length > height) {
      const { run, children } = stack.pop();
      const target = stack.at(-1).children;
      if (run.count) target.push(run.char.repeat(run.count));
      for (const child of children) target.push(child);
    }
  };
  for (const { inline, run } of parts) {
    if (!run) { stack.at(-1).children.push(inline); continue; }
    while (run.canClose && run.count > 0) {
      const kind = `${run.char}${run.canOpen}${run.original % 3}`;
      const bottom = Math.min(bottoms.get(kind) ?? 0, stack.length - 1);
      let height = stack.length - 1;
      while (height > bottom && !matches(stack[height].run, run)) height -= 1;
      if (height <= bottom) { bottoms.set(kind, stack.length - 1); break; }
      close(height + 1);
      const opener = stack[height], size = run.char === "~" ? 2 : Math.min(2, opener.run.count, run.count);
      const type = run.char === "~" ? "strike" : size === 2 ? "strong" : "emphasis";
      const made = { type, children: opener.children };
      opener.run.count -= size;
      run.count -= size;
      if (opener.run.count > 0) {
        opener.children = [made];
      } else {
        stack.pop();
        stack.at(-1).children.push(made);
        for (const [name, value] of bottoms) if (value > stack.length - 1) bottoms.set(name, stack.length - 1);
      }
    }
    if (run.count > 0 && run.canOpen && stack.length <= MAX_OPEN) stack.push({ children: [], run });
    else if (run.count > 0) stack.at(-1).children.push(run.char.repeat(run.count));
  }
  close(1);
  return stack[0].children;
}

/** @param {Run|null} opener @param {Run} closer */
function matches(opener, closer) {
  if (!opener || opener.char !== closer.char || opener.count === 0) return false;
  const odd = (opener.canClose || closer.canOpen) && (opener.original + closer.original) % 3 === 0;
  return !odd || (opener.original % 3 === 0 && closer.original % 3 === 0);
}
