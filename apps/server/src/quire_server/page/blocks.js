/**
 * Markdown into blocks: paragraphs, headings, lists, quotes, tables, fences, formulas and rules.
 *
 * A pure function of lines, in time proportional to their length: what is nested deeper than `MAX_DEPTH` is text.
 *
 * @typedef {{type: "paragraph", text: string}} Paragraph
 * @typedef {{type: "heading", level: number, text: string}} Heading
 * @typedef {{type: "code", language: string, text: string, closed: boolean}} Code
 * @typedef {{type: "math", text: string}} Formula
 * @typedef {{type: "quote", blocks: Block[]}} Quote
 * @typedef {{task: boolean|null, source: string, blocks: Block[]}} Item
 * @typedef {{type: "list", ordered: boolean, first: number, tight: boolean, items: Item[]}} List
 * @typedef {{type: "table", aligns: string[], header: string[], rows: string[][]}} Table
 * @typedef {{type: "rule"}} Rule
 * @typedef {(Paragraph|Heading|Code|Formula|Quote|List|Table|Rule) & {line?: number}} Block
 */

const MAX_DEPTH = 16;
const MAX_COLUMNS = 100;

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-+*]|\d{1,9}[.)])(?:( +)(?=\S)|[ \t]*$)/;
const DELIMITER_CELL = /^:?-+:?$/;
const MATH_BEGIN = /^ {0,3}(?:(\$\$)|(\\\[)|\\begin\{(equation|align|gather|multline|alignat|eqnarray)(\*?)\})/;

/**
 * @param {string} text
 * @returns {Block[]} Each with the number of its first line.
 */
export function parseBlocks(text) {
  return blocksOf(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

/**
 * @param {string[]} lines
 * @param {number} depth
 * @returns {Block[]}
 */
function blocksOf(lines, depth) {
  /** @type {Block[]} */
  const blocks = [];
  let place = 0;
  while (place < lines.length) {
    const line = lines[place];
    if (!line.trim()) { place += 1; continue; }
    const [block, next] = blockAt(lines, place, depth);
    block.line = place;
    blocks.push(block);
    place = next;
  }
  return blocks;
}

/** @returns {[Block, number]} The block that begins in a line, and the line behind it. */
function blockAt(lines, place, depth) {
  const line = lines[place];
  const fence = FENCE.exec(line);
  if (fence) return fenceAt(lines, place, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).replace(/(?:^|[ \t])#+[ \t]*$/, "").trim();
    return [{ type: "heading", level: heading[1].length, text }, place + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, place + 1];
  const math = MATH_BEGIN.exec(line);
  if (math) {
    const found = mathAt(lines, place, math);
    if (found) return found;
  }
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quoteAt(lines, place, depth);
  const item = depth < MAX_DEPTH ? ITEM.exec(line) : null;
  if (item) return listAt(lines, place, item, depth);
  const table = tableAt(lines, place);
  if (table) return table;
  return paragraphAt(lines, place, depth);
}

function fenceAt(lines, place, [, indent, marks, info]) {
  const closing = new RegExp(`^ {0,3}${marks[0] === "~" ? "~" : "`"}{${marks.length},} *$`);
  const body = [];
  let next = place + 1;
  while (next < lines.length && !closing.test(lines[next])) {
    body.push(indent ? lines[next].replace(new RegExp(`^ {0,${indent.length}}`), "") : lines[next]);
    next += 1;
  }
  const closed = next < lines.length;
  const language = info.trim().split(/[\s,{]/)[0].toLowerCase();
  return [{ type: "code", language, text: body.join("\n"), closed }, next + (closed ? 1 : 0)];
}

/** A formula of its own; null where it never ends. */
function mathAt(lines, place, [whole, dollars, bracket, environment, star]) {
  const end = dollars ? "$$" : bracket ? "\\]" : `\\end{${environment}${star}}`;
  const body = [];
  for (let next = place; next < lines.length && next < place + 200; next += 1) {
    const start = next === place && !environment ? whole.length : next === place && environment ? whole.trimStart().length : 0;
    const found = lines[next].indexOf(end, start);
    const text = next === place && !environment ? lines[next].slice(whole.length) : lines[next];
    if (found < 0) { body.push(text); continue; }
    if (lines[next].slice(found + end.length).replace(/[.,;]/, "").trim()) return null;  // goes on in a sentence
    const cut = text.slice(0, text.lastIndexOf(end) + (environment ? end.length : 0));
    return [{ type: "math", text: [...body, cut].join("\n").trim() }, next + 1];
  }
  return null;
}

function quoteAt(lines, place, depth) {
  const body = [];
  let next = place;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (QUOTE.test(line)) body.push(line.replace(QUOTE, ""));
    else if (line.trim() && body.at(-1)?.trim() && !beginsBlock(line)) body.push(line);  // a lazy continuation
    else break;
  }
  return [{ type: "quote", blocks: blocksOf(body, depth + 1) }, next];
}

/** Whether a line ends the paragraph above it. */
function beginsBlock(line) {
  if (HEADING.test(line) || RULE.test(line) || FENCE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item && item[3] && (!/^\d/.test(item[2]) || /^1[.)]/.test(item[2]))) return true;
  return /^ {0,3}(?:\$\$|\\\[)/.test(line);
}

function listAt(lines, place, first, depth) {
  const base = first[1].length, ordered = /\d/.test(first[2]), kind = first[2].at(-1);
  /** @type {Item[]} */
  const items = [];
  let tight = true, next = place;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || item[1].length < base || item[1].length > base + 3 || item[2].at(-1) !== kind || RULE.test(lines[next])) break;
    const width = item[1].length + item[2].length + Math.min(item[3]?.length ?? 1, 4);
    const body = [lines[next].slice(width)];
    let blank = 0;
    next += 1;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      if (!line.trim()) { blank += 1; body.push(""); continue; }
      const indent = line.length - line.trimStart().length;
      const following = ITEM.exec(line);
      const isInside = indent >= width || (indent > base + 1 && (!following || indent >= base + 2));
      if (!isInside && (blank || following || beginsBlock(line))) break;
      body.push(line.slice(Math.min(indent, width)));
      if (blank && isInside && !following) tight = false;
      blank = 0;
    }
    if (blank && next < lines.length && ITEM.exec(lines[next])?.[1].length === base) tight = false;
    while (body.length > 1 && !body.at(-1)) body.pop();
    const task = /^\[([ xX])\] +(?=\S)/.exec(body[0]);
    if (task) body[0] = body[0].slice(task[0].length);
    items.push({ task: task ? task[1] !== " " : null, source: body.join("\n"), blocks: blocksOf(body, depth + 1) });
  }
  return [{ type: "list", ordered, first: ordered ? Number.parseInt(first[2], 10) : 1, tight, items }, next];
}

/** @returns {[Table, number]|null} */
function tableAt(lines, place) {
  if (!lines[place].includes("|") || place + 1 >= lines.length) return null;
  const delimiter = lines[place + 1];
  if (!/^ {0,3}[|:-][\s|:-]*$/.test(delimiter) || !delimiter.includes("-")) return null;
  const marks = cellsOf(delimiter), header = cellsOf(lines[place]);
  if (marks.length !== header.length || marks.length > MAX_COLUMNS || !marks.every((mark) => DELIMITER_CELL.test(mark))) return null;
  const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : mark.startsWith(":") ? "left" : ""));
  const rows = [];
  let next = place + 2;
  for (; next < lines.length && lines[next].trim() && lines[next].includes("|"); next += 1) {
    const cells = cellsOf(lines[next]).slice(0, header.length);
    while (cells.length < header.length) cells.push("");
    rows.push(cells);
  }
  return [{ type: "table", aligns, header, rows }, next];
}

/** Cells of a row; bars in code and behind a backslash belong to their cell. @returns {string[]} */
function cellsOf(line) {
  const cells = [];
  let cell = "", inCode = false;
  for (let place = 0; place < line.length; place += 1) {
    const char = line[place];
    if (char === "\\" && line[place + 1] === "|") { cell += "|"; place += 1; continue; }
    if (char === "`") inCode = !inCode && line.indexOf("`", place + 1) > 0;
    if (char === "|" && !inCode) { cells.push(cell.trim()); cell = ""; continue; }
    cell += char;
  }
  cells.push(cell.trim());
  if (cells[0] === "" && cells.length > 1) cells.shift();
  if (cells.at(-1) === "" && cells.length > 1) cells.pop();
  return cells;
}

function paragraphAt(lines, place, depth) {
  const body = [lines[place].trim()];
  let next = place + 1;
  for (; next < lines.length && lines[next].trim(); next += 1) {
    const under = /^ {0,3}(=+|-+) *$/.exec(lines[next]);
    if (under && (under[1].length > 1 || under[1] === "=")) {
      return [{ type: "heading", level: under[1][0] === "=" ? 1 : 2, text: body.join("\n") }, next + 1];
    }
    if (depth < MAX_DEPTH && beginsBlock(lines[next]) || MATH_BEGIN.test(lines[next]) || tableAt(lines, next)) break;
    body.push(lines[next].trimStart());
  }
  return [{ type: "paragraph", text: body.join("\n").trimEnd() }, next];
}
