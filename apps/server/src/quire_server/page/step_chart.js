/** The make-up of the last steps: a bar for each, of prompt tokens, decodes and drafts. */

import { announce, make } from "./dom.js";
import { seconds, sharp, styleColour } from "./engine_format.js";

const NUM_STEPS = 200, HEIGHT = 130;
/** Kinds of tokens of a step, the lowest part of a bar first. @type {[string, string][]} */
const PARTS = [["decode", "decodes"], ["draft", "drafts"], ["prefill", "prompts"]];

export class StepChart {
  constructor() {
    this.canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { role: "img", tabIndex: 0, "aria-label": "Tokens of the last steps; arrow keys go from step to step" }));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("mousemove", (event) => this.#pick(this.#indexAt(event.offsetX), false));
    this.canvas.addEventListener("mouseleave", () => this.#pick(null, false));
    this.canvas.addEventListener("blur", () => this.#pick(null, false));
    this.note = make("p.note", {}, "no step yet");
    const legend = make("ul.legend", {}, ...PARTS.map(([name, text]) => make("li", {}, make(`i.${name}`, { "aria-hidden": "true" }), text)));
    this.element = make("figure.steps", {}, this.canvas, legend, this.note);
    /** @type {import("./engine_state.js").Step[]} */
    this.steps = [];
    /** Number of the step that is pointed at. @type {number|null} */
    this.pointed = null;
  }

  /** @param {import("./engine_state.js").Step[]} steps */
  draw(steps) {
    this.steps = steps;
    const { context, width } = sharp(this.canvas, HEIGHT);
    const most = Math.max(1, ...steps.map(total));
    const bar = width / NUM_STEPS;
    const colours = Object.fromEntries(PARTS.map(([name]) => [name, styleColour(`--${name}`)]));
    context.fillStyle = styleColour("--line");
    context.fillRect(0, HEIGHT - 1, width, 1);
    steps.forEach((step, index) => {
      const x = width - (steps.length - index) * bar;
      // Prompts bring hundreds of tokens and decodes few: heights grow with the square root, parts of a bar by share.
      const height = Math.sqrt(total(step) / most) * (HEIGHT - 6);
      let bottom = HEIGHT - 1;
      for (const [name] of PARTS) {
        const part = (step[name] / Math.max(total(step), 1)) * height;
        context.fillStyle = colours[name];
        context.fillRect(x, bottom - part, Math.max(bar - 1, 1), part);
        bottom -= part;
      }
      if (step.number === this.pointed) {
        context.strokeStyle = styleColour("--ink");
        context.strokeRect(x - 0.5, 0.5, bar, HEIGHT - 1);
      }
    });
    this.#tell(most);
  }

  #tell(most) {
    const step = this.steps.find((each) => each.number === this.pointed);
    if (step) this.note.textContent = described(step);
    else if (this.steps.length) this.note.textContent = `the last ${this.steps.length} steps, at most ${most} tokens in one; ${seconds(median(this.steps.map((each) => each.seconds)))} in the middle`;
    else this.note.textContent = "no step yet";
  }

  /** @param {number|null} index @param {boolean} says */
  #pick(index, says) {
    const step = index === null ? undefined : this.steps[index];
    this.pointed = step ? step.number : null;
    this.draw(this.steps);
    if (says && step) announce(described(step));
  }

  /** @param {number} x */
  #indexAt(x) {
    return Math.floor(this.steps.length - (this.canvas.clientWidth - x) / (this.canvas.clientWidth / NUM_STEPS));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.steps.length || event.altKey) return;
    event.preventDefault();
    const current = this.steps.findIndex((each) => each.number === this.pointed);
    const wanted = (current < 0 ? this.steps.length : current) + moves[event.key];
    this.#pick(Math.min(Math.max(wanted, 0), this.steps.length - 1), true);
  }
}

/** @param {import("./engine_state.js").Step} step */
function total(step) {
  return step.prefill + step.decode + step.draft;
}

/** @param {import("./engine_state.js").Step} step */
function described(step) {
  const drafts = step.draft ? `, ${step.draft} draft tokens (${step.accepted} accepted)` : "";
  return `step ${step.number}: ${step.prefill} prompt tokens of ${step.prefillRows} requests, ${step.decode} decodes${drafts}; ${seconds(step.seconds)}; ${step.running} running, ${step.waiting} waiting, ${step.used} blocks`;
}

/** @param {number[]} values */
function median(values) {
  return [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)];
}
