/**
 * Formulas: a subset of LaTeX's mathematics as MathML, which browsers draw themselves.
 *
 * A recursive descent over tokens. What is not in the subset makes the whole formula its source, in the type of code.
 */

import { make } from "./dom.js";
import {
  ACCENTS, BIG_OPERATORS, FUNCTIONS, INTEGRALS, LETTERS, LIMITS, MATRICES, OPERATORS, SPACES, UNDER_ACCENTS, isAlphabet, styled,
} from "./math_symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_CHARS = 5000;
const MAX_DEPTH = 40;
const TOKEN = /\\(?:[A-Za-z]+\*?|[\s\S])|[{}^_&~'$#%]|\s+|\d+(?:\.\d+)?|[\s\S]/gu;
const DELIMITERS = { "\\{": "{", "\\}": "}", "\\|": "‖", ".": "", "<": "⟨", ">": "⟩" };
const SIZES = /^\\(?:big|Big|bigg|Bigg)[lrm]?$/;
const STRETCHY_ARROWS = {
  "\\xrightarrow": "→", "\\xleftarrow": "←", "\\xleftrightarrow": "↔", "\\xRightarrow": "⇒", "\\xLeftarrow": "⇐", "\\xmapsto": "↦",
};
const FRACTIONS = { "\\over": null, "\\atop": ["", ""], "\\choose": ["(", ")"], "\\brace": ["{", "}"], "\\brack": ["[", "]"] };
const COLOURS = /^(?:[A-Za-z]{3,20}|#[\da-fA-F]{3}(?:[\da-fA-F]{3})?)$/;

class Unsupported extends Error {}

/**
 * @param {string} source
 * @param {boolean} display  Whether it stands alone.
 * @returns {Element}
 */
export function formula(source, display) {
  try {
    if (source.length > MAX_CHARS) throw new Unsupported("too long");
    const math = node("math", {}, ...new Parser(source, display).parse());
    if (display) math.setAttribute("display", "block");
    math.setAttribute("aria-label", source);
    return make(display ? "div.formula" : "span.formula", { title: source }, math);
  } catch (error) {
    if (!(error instanceof Unsupported)) throw error;
    return make(display ? "pre.formula" : "code.formula", {}, source);
  }
}

/** @returns {Element} */
function node(tag, attributes = {}, ...children) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const row = (children) => (children.length === 1 ? children[0] : node("mrow", {}, ...children));

class Parser {
  /** @param {string} source @param {boolean} display */
  constructor(source, display) {
    const text = source.replace(/(?<!\\)%[^\n]*/g, "").replace(/\\(?:label|nonumber|notag|centering)(?:\{[^}]*\})?/g, "");
    this.tokens = text.match(TOKEN) ?? [];
    this.place = 0;
    this.display = display;
    this.depth = 0;
  }

  parse() {
    const nodes = this.#until(() => false);
    if (this.place < this.tokens.length) throw new Unsupported(this.tokens[this.place]);
    return nodes;
  }

  #peek() {
    while (/^\s/.test(this.tokens[this.place] ?? "")) this.place += 1;
    return this.tokens[this.place];
  }

  #next() {
    const token = this.#peek();
    if (token === undefined) throw new Unsupported("it ends too early");
    this.place += 1;
    return token;
  }

  #expect(token) {
    const found = this.#next();
    if (found !== token) throw new Unsupported(`${found} in place of ${token}`);
  }

  /** Nodes up to a token that ends them, which stays. @param {(token: string) => boolean} ends @returns {Element[]} */
  #until(ends) {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new Unsupported("too deep");
    const nodes = [];
    for (let token = this.#peek(); token !== undefined && token !== "}" && !ends(token); token = this.#peek()) {
      if (Object.hasOwn(FRACTIONS, token)) {
        this.place += 1;
        const below = row(this.#until(ends)), marks = FRACTIONS[token];
        this.depth -= 1;
        return [marks ? stacked(row(nodes), below, marks) : node("mfrac", {}, row(nodes), below)];
      }
      if (token === "\\color") {  // holds to the end of the group
        this.place += 1;
        const colour = this.#colour();
        nodes.push(node("mstyle", { mathcolor: colour }, ...this.#until(ends)));
        continue;
      }
      nodes.push(this.#scripted());
    }
    this.depth -= 1;
    return nodes;
  }

  /** A group in braces, or one atom. */
  #argument() {
    if (this.#peek() !== "{") return this.#atom();
    this.place += 1;
    const nodes = this.#until(() => false);
    this.#expect("}");
    return row(nodes);
  }

  /** The characters of a group, with spaces. */
  #text() {
    this.#expect("{");
    let text = "", open = 1;
    for (;;) {
      const token = this.tokens[this.place];
      if (token === undefined) throw new Unsupported("a brace is open");
      this.place += 1;
      if (token === "{") open += 1;
      else if (token === "}" && --open === 0) return text.replace(/\s+/g, " ").replace(/^ | $/g, "\u00a0");
      else text += token === "~" || token === "\\ " ? "\u00a0" : /^\\[^A-Za-z]$/.test(token) ? token.slice(1) : token;
    }
  }

  /** An atom with what stands above and below it. */
  #scripted() {
    const limits = this.#takesLimits(this.#peek());
    const base = this.#atom();
    let sub = null, sup = null, hasLimits = limits;
    for (;;) {
      const token = this.#peek();
      if (token === "\\limits" || token === "\\nolimits") { hasLimits = token === "\\limits"; this.place += 1; continue; }
      if (token === "_" && sub === null) { this.place += 1; sub = this.#argument(); continue; }
      if (token === "^" && sup === null) { this.place += 1; sup = this.#argument(); continue; }
      if (token === "'" && sup === null) {
        let marks = "";
        while (this.#peek() === "'") { marks += "′"; this.place += 1; }
        sup = node("mo", {}, marks);
        if (this.#peek() === "^") { this.place += 1; sup = row([sup, this.#argument()]); }
        continue;
      }
      break;
    }
    if (sub === null && sup === null) return base;
    const kind = hasLimits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (sub !== null && sup !== null) return node(kind[2], {}, base, sub, sup);
    return sub !== null ? node(kind[0], {}, base, sub) : node(kind[1], {}, base, sup);
  }

  #takesLimits(token) {
    const name = token?.slice(1).replace(/\*$/, "");
    if (token?.[0] !== "\\") return false;
    if (name === "underbrace" || name === "overbrace" || token === "\\operatorname*") return true;
    return this.display && (Object.hasOwn(BIG_OPERATORS, name) || LIMITS.has(name));
  }

  /** @returns {Element} */
  #atom() {
    const token = this.#next();
    if (token === "{") {
      this.place -= 1;
      return this.#argument();
    }
    if (token[0] === "\\") return this.#command(token);
    if (/^\d/.test(token)) return node("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return node("mi", {}, token);
    if (token === "~") return node("mspace", { width: SPACES[" "] });
    if ("^_&}#$%".includes(token)) throw new Unsupported(token);
    if (token === "'") return node("mo", {}, "′");
    const mark = { "-": "−", "*": "∗", "/": "/" }[token] ?? token;
    if ("()[]|".includes(token)) return node("mo", { stretchy: "false" }, mark);
    return node("mo", token === "/" ? { lspace: "0", rspace: "0" } : token === "," ? { separator: "true" } : {}, mark);
  }

  /** @param {string} token @returns {Element} */
  #command(token) {
    const name = token.slice(1);
    if (Object.hasOwn(LETTERS, name)) return node("mi", /^[A-Z∞]/u.test(name) ? { mathvariant: "normal" } : {}, LETTERS[name]);
    if (Object.hasOwn(OPERATORS, name)) return node("mo", {}, OPERATORS[name]);
    if (Object.hasOwn(BIG_OPERATORS, name)) return node("mo", { movablelimits: "true", largeop: "true" }, BIG_OPERATORS[name]);
    if (Object.hasOwn(INTEGRALS, name)) return node("mo", { largeop: "true" }, INTEGRALS[name]);
    if (FUNCTIONS.has(name)) return this.#function(name.replace(/^arg(max|min)$/, "arg\u2009$1").replace(/^lim(inf|sup)$/, "lim\u2009$1"));
    if (Object.hasOwn(SPACES, name)) return node("mspace", { width: SPACES[name] });
    if (Object.hasOwn(ACCENTS, name)) return node("mover", { accent: "true" }, this.#argument(), node("mo", {}, ACCENTS[name]));
    if (Object.hasOwn(UNDER_ACCENTS, name)) return node("munder", { accentunder: "true" }, this.#argument(), node("mo", {}, UNDER_ACCENTS[name]));
    if (isAlphabet(name)) return this.#inAlphabet(name);
    if (Object.hasOwn(STRETCHY_ARROWS, token)) return this.#arrow(token);
    if (SIZES.test(token)) return node("mo", { stretchy: "false", minsize: /[bB]igg/.test(name) ? "2em" : "1.4em" }, this.#delimiter());
    if (/^[{}%$&#_|]$/.test(name)) return node("mo", { stretchy: "false" }, DELIMITERS[token] ?? name);
    return this.#construct(token);
  }

  /** Commands with arguments of their own. @param {string} token @returns {Element} */
  #construct(token) {
    switch (token) {
      case "\\frac": case "\\cfrac": return node("mfrac", {}, this.#argument(), this.#argument());
      case "\\dfrac": return node("mstyle", { displaystyle: "true" }, node("mfrac", {}, this.#argument(), this.#argument()));
      case "\\tfrac": return node("mstyle", { displaystyle: "false" }, node("mfrac", {}, this.#argument(), this.#argument()));
      case "\\binom": case "\\dbinom": case "\\tbinom": return binomial(this.#argument(), this.#argument());
      case "\\sqrt": return this.#root();
      case "\\text": case "\\textrm": case "\\textnormal": case "\\mbox": case "\\hbox": return node("mtext", {}, this.#text());
      case "\\textbf": return node("mtext", { class: "bold" }, this.#text());
      case "\\textit": case "\\emph": return node("mtext", { class: "italic" }, this.#text());
      case "\\texttt": return node("mtext", { class: "mono" }, this.#text());
      case "\\mathrm": case "\\mathnormal": case "\\rm": return this.#peek() === "{" ? node("mi", { mathvariant: "normal" }, this.#text()) : this.#argument();
      case "\\mathit": return node("mi", {}, this.#text());
      case "\\operatorname": case "\\operatorname*": return this.#function(this.#text());
      case "\\left": return this.#fenced();
      case "\\begin": return this.#environment();
      case "\\textcolor": { const colour = this.#colour(); return node("mstyle", { mathcolor: colour }, this.#argument()); }
      case "\\phantom": return node("mphantom", {}, this.#argument());
      case "\\hphantom": return node("mpadded", { height: "0", depth: "0" }, node("mphantom", {}, this.#argument()));
      case "\\vphantom": return node("mpadded", { width: "0" }, node("mphantom", {}, this.#argument()));
      case "\\smash": return node("mpadded", { height: "0", depth: "0" }, this.#argument());
      case "\\cancel": case "\\bcancel": case "\\xcancel": case "\\sout": return node("mrow", { class: "cancelled" }, this.#argument());
      case "\\mathop": case "\\mathbin": case "\\mathrel": case "\\mathord": case "\\mathopen": case "\\mathclose": case "\\mathpunct":
      case "\\mathinner": case "\\ensuremath": return this.#argument();
      case "\\hspace": case "\\hspace*": case "\\mspace": case "\\kern": case "\\mkern": return this.#space();
      case "\\bra": return node("mrow", {}, fence("⟨"), this.#argument(), fence("|"));
      case "\\ket": return node("mrow", {}, fence("|"), this.#argument(), fence("⟩"));
      case "\\braket": return node("mrow", {}, fence("⟨"), this.#argument(), fence("⟩"));
      case "\\abs": return node("mrow", {}, fence("|"), this.#argument(), fence("|"));
      case "\\norm": return node("mrow", {}, fence("‖"), this.#argument(), fence("‖"));
      case "\\overset": case "\\stackrel": { const above = this.#argument(); return node("mover", {}, this.#argument(), above); }
      case "\\underset": { const below = this.#argument(); return node("munder", {}, this.#argument(), below); }
      case "\\not": return this.#negated();
      case "\\pmod": return node("mrow", {}, node("mspace", { width: "0.5em" }), node("mo", {}, "("), node("mi", {}, "mod"), node("mspace", { width: "0.3em" }), this.#argument(), node("mo", {}, ")"));
      case "\\bmod": case "\\mod": return node("mo", { lspace: "0.3em", rspace: "0.3em" }, "mod");
      case "\\boxed": case "\\fbox": return node("mrow", { class: "boxed" }, this.#argument());
      case "\\tag": case "\\tag*": return node("mtext", { class: "tag" }, `\u2003(${this.#text()})`);
      case "\\substack": return this.#stack();
      case "\\displaystyle": case "\\textstyle": case "\\scriptstyle": case "\\nolimits": case "\\limits": return node("mrow");
      default: throw new Unsupported(token);
    }
  }

  #colour() {
    const colour = this.#text();
    if (!COLOURS.test(colour)) throw new Unsupported(colour);
    return colour;
  }

  /** A width in braces, or behind \kern without. */
  #space() {
    let text = "";
    if (this.#peek() === "{") text = this.#text();
    else while (/^(?:[-+.\d\s]+|[a-z])$/.test(this.tokens[this.place] ?? "") && !/[a-z]{2}$/.test(text)) text += this.tokens[this.place++];
    const [, width, unit] = /^\s*(-?\d*\.?\d+)\s*(em|ex|pt|px|cm|mm|in|mu)\s*$/.exec(text) ?? [];
    if (width === undefined || Math.abs(Number(width)) > 200) throw new Unsupported(text);
    return node("mspace", { width: unit === "mu" ? `${Number(width) / 18}em` : `${width}${unit}` });
  }

  /** A name like "sin", with the space that LaTeX puts behind it. */
  #function(name) {
    const needsSpace = !/^[({[^_\\}&]/.test(this.#peek() ?? "(") || /^\\[a-z]/i.test(this.#peek() ?? "");
    const children = [node("mi", { mathvariant: "normal" }, name), node("mo", {}, "\u2061")];
    if (needsSpace) children.push(node("mspace", { width: "0.167em" }));
    return children.length === 2 ? children[0] : node("mrow", {}, ...children);
  }

  #inAlphabet(name) {
    const group = this.#argument();
    const all = group.matches?.("mi, mn") ? [group] : [...group.querySelectorAll("mi, mn")];
    for (const each of all) each.textContent = [...(each.textContent ?? "")].map((char) => styled(char, name)).join("");
    return group;
  }

  #root() {
    if (this.#peek() !== "[") return node("msqrt", {}, this.#argument());
    this.place += 1;
    const index = row(this.#until((token) => token === "]"));
    this.#expect("]");
    return node("mroot", {}, this.#argument(), index);
  }

  #arrow(token) {
    let below = null;
    if (this.#peek() === "[") {
      this.place += 1;
      below = row(this.#until((each) => each === "]"));
      this.#expect("]");
    }
    const arrow = node("mo", { stretchy: "true", minsize: "2em" }, STRETCHY_ARROWS[token]), above = this.#argument();
    return below ? node("munderover", {}, arrow, below, above) : node("mover", {}, arrow, above);
  }

  /** The mark behind \left, \right, \big and the like. */
  #delimiter() {
    const token = this.#next();
    const mark = DELIMITERS[token] ?? (token[0] === "\\" ? OPERATORS[token.slice(1)] : token);
    if (mark === undefined || !/^[()[\]{}|‖⟨⟩⌊⌋⌈⌉/\\↑↓↕⇑⇓]?$/u.test(mark)) throw new Unsupported(token);
    return mark;
  }

  #fenced() {
    const children = [node("mo", { fence: "true", stretchy: "true" }, this.#delimiter())];
    for (;;) {
      children.push(...this.#until((token) => token === "\\right" || token === "\\middle"));
      const token = this.#next();
      if (token !== "\\right" && token !== "\\middle") throw new Unsupported(token);
      children.push(node("mo", { fence: "true", stretchy: "true" }, this.#delimiter()));
      if (token === "\\right") return node("mrow", {}, ...children);
    }
  }

  #negated() {
    const group = this.#atom();
    if (group.localName !== "mo") throw new Unsupported("\\not");
    group.append("\u0338");
    return group;
  }

  #environment() {
    const name = this.#text();
    if (!Object.hasOwn(MATRICES, name)) throw new Unsupported(name);
    if (/^(?:array|alignat|alignedat|subarray)/.test(name) && this.#peek() === "{") this.#text();
    const table = this.#table((token) => token === "\\end");
    this.#expect("\\end");
    if (this.#text() !== name) throw new Unsupported(name);
    const [left, right] = MATRICES[name];
    if (/^(?:align|split|eqnarray|gather|multline|equation)/.test(name)) {
      table.setAttribute("displaystyle", "true");
      table.classList.add(/^(?:gather|multline|equation)/.test(name) ? "centred" : "aligned");
    } else if (/cases/.test(name)) {
      table.classList.add("cases");
    }
    const fence = (mark) => node("mo", { fence: "true", stretchy: "true" }, mark);
    return left || right ? node("mrow", {}, fence(left), table, fence(right)) : table;
  }

  #stack() {
    this.#expect("{");
    const table = this.#table((token) => token === "}");
    this.#expect("}");
    return table;
  }

  /** Rows of cells, up to a token that ends them, which stays. */
  #table(ends) {
    const rows = [[]];
    for (;;) {
      const cell = this.#until((token) => token === "&" || token === "\\\\" || token === "\\hline" || token === "\\cr" || ends(token));
      const token = this.#peek();
      if (token === undefined) throw new Unsupported("an environment is open");
      if (token === "\\hline") { this.place += 1; continue; }
      rows.at(-1).push(node("mtd", {}, ...cell));
      if (ends(token)) break;
      if (token === "}") throw new Unsupported(token);
      this.place += 1;
      if (token === "&") continue;
      if (this.#peek() === "[") while (this.#next() !== "]");  // extra space between rows
      rows.push([]);
    }
    if (rows.length > 1 && rows.at(-1).every((cell) => !cell.hasChildNodes())) rows.pop();
    return node("mtable", {}, ...rows.map((cells) => node("mtr", {}, ...cells)));
  }
}

const fence = (mark) => node("mo", { fence: "true", stretchy: "true" }, mark);

const binomial = (above, below) => stacked(above, below, ["(", ")"]);

/** @param {Element} above @param {Element} below @param {string[]} marks  On the left and on the right. */
function stacked(above, below, [left, right]) {
  const pair = node("mfrac", { linethickness: "0" }, above, below);
  return left ? node("mrow", {}, node("mo", {}, left), pair, node("mo", {}, right)) : pair;
}
