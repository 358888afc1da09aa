/** The KV cache's blocks as a map, coloured by who holds them. */

import { make } from "./dom.js";
import { colour, counted, sharp, styleColour } from "./engine_format.js";

const MOST_HEIGHT = 220, LARGEST = 16, SMALLEST = 4;

export class BlockMap {
  /** @param {(number: number) => void} choose  Called with the number of a request. */
  constructor(choose) {
    this.canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { role: "img" }));
    this.canvas.addEventListener("click", (event) => {
      const holder = this.#holderAt(event);
      if (holder !== null && Math.abs(holder) > 1) choose(Math.abs(holder));
    });
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.note = make("p.note");
    this.element = make("figure.map", {}, this.canvas, this.#legend(), this.note);
    this.layout = { size: LARGEST, columns: 1, each: 1 };
    /** @type {import("./engine_state.js").EngineState|null} */
    this.state = null;
  }

  #legend() {
    const entry = (name, text) => make("li", {}, make(`i.${name}`, { "aria-hidden": "true" }), text);
    return make("ul.legend", {}, entry("held", "computed by a request"), entry("prefix", "cached prefix in use"), entry("shared", "shared by several"), entry("cached", "cached, unused"), entry("free", "free"));
  }

  /** @param {import("./engine_state.js").EngineState} state @param {number|null} chosen  Number of the request that stands out. */
  draw(state, chosen) {
    this.state = state;
    const { holders } = state, width = this.canvas.clientWidth || 300;
    this.layout = layout(holders.length, width);
    const { size, columns, each } = this.layout;
    const numCells = Math.ceil(holders.length / each);
    const { context } = sharp(this.canvas, Math.max(Math.ceil(numCells / columns), 1) * size);
    const colours = { cached: styleColour("--cached"), free: styleColour("--line"), shared: styleColour("--accent") };
    const inner = size - (size > 6 ? 2 : 1);
    for (let cell = 0; cell < numCells; cell++) {
      const holder = each === 1 ? holders[cell] : strongest(holders, cell * each, each);
      const x = (cell % columns) * size, y = Math.floor(cell / columns) * size;
      const number = Math.abs(holder);
      context.globalAlpha = chosen !== null && number !== chosen ? 0.35 : 1;
      if (holder === 0) {
        context.strokeStyle = colours.free;
        context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      } else if (holder < -1) {
        context.strokeStyle = colour(number);
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, inner - 2, inner - 2);
        context.lineWidth = 1;
      } else {
        context.fillStyle = holder === -1 ? colours.cached : holder === 1 ? colours.shared : colour(number);
        context.fillRect(x, y, inner, inner);
      }
    }
    context.globalAlpha = 1;
    const counts = state.blockCounts();
    const text = `${counted(holders.length, "block")} of ${counted(state.blockSize, "token")}: ${counts.used} in use, ${counts.cached} cached, ${counts.free} free`;
    this.canvas.setAttribute("aria-label", `KV cache, ${text}`);
    if (!this.pointed) this.note.textContent = each > 1 ? `${text}; ${each} blocks a square` : text;
  }

  /** @param {MouseEvent} event */
  #holderAt(event) {
    const block = this.#blockAt(event);
    return this.state && block < this.state.holders.length ? this.state.holders[block] : null;
  }

  /** @param {MouseEvent} event */
  #blockAt(event) {
    const { size, columns, each } = this.layout;
    const column = Math.floor(event.offsetX / size);
    return column < columns ? (Math.floor(event.offsetY / size) * columns + column) * each : Infinity;
  }

  /** @param {MouseEvent} event */
  #point(event) {
    const holder = this.#holderAt(event);
    this.canvas.title = holder === null ? "" : `block ${this.#blockAt(event) + 1}: ${meaning(holder)}`;
  }
}

/** @param {number} holder */
function meaning(holder) {
  if (holder === 0) return "free";
  if (holder === -1) return "cached, unused";
  if (holder === 1) return "a cached prefix that several requests use";
  return holder < 0 ? `a cached prefix that request #${-holder} uses` : `computed by request #${holder}`;
}

/** The largest squares that fit; where the smallest do not, several blocks share one. @param {number} count @param {number} width */
function layout(count, width) {
  for (let size = LARGEST; size >= SMALLEST; size--) {
    const columns = Math.max(Math.floor(width / size), 1);
    if (Math.ceil(count / columns) * size <= MOST_HEIGHT) return { size, columns, each: 1 };
  }
  const columns = Math.max(Math.floor(width / SMALLEST), 1);
  return { size: SMALLEST, columns, each: Math.ceil(count / (columns * Math.floor(MOST_HEIGHT / SMALLEST))) };
}

/** What to show of some blocks: a request rather than what is cached, and that rather than nothing. */
function strongest(holders, start, count) {
  let found = 0;
  for (let index = start; index < Math.min(start + count, holders.length); index++) {
    if (holders[index] !== 0 && (found === 0 || found === -1)) found = holders[index];
  }
  return found;
}
