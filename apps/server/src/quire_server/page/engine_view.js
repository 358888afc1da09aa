/** The engine, live: figures, blocks, steps and requests. It is watched only while this is looked at. */

import { ServerError, watchEngine } from "./api.js";
import { BlockMap } from "./block_map.js";
import { byId, make } from "./dom.js";
import { percent, rate, seconds } from "./engine_format.js";
import { EngineState } from "./engine_state.js";
import { RequestStory } from "./request_story.js";
import { RequestTable } from "./request_table.js";
import { StepChart } from "./step_chart.js";

const RETRY_MS = 1500, REFRESH_MS = 1000;

export class EngineView {
  constructor() {
    /** @type {Map<number, EngineState>} */
    this.engines = new Map();
    /** Number of the request that is explained. @type {number|null} */
    this.chosen = null;
    this.story = new RequestStory(() => this.#choose(null));
    this.blocks = new BlockMap((number) => this.#chooseNumber(number));
    this.steps = new StepChart();
    this.table = new RequestTable((request) => this.#choose(request));
    this.figures = make("dl.figures");
    this.status = make("p.note", { role: "status" }, "connecting…");
    this.picker = /** @type {HTMLSelectElement} */ (make("select", { id: "engine-rank", "aria-label": "Engine", hidden: true, onchange: () => { this.#choose(null); this.#draw(); } }));
    const part = (title, ...children) => make("section", {}, make("h2", {}, title), ...children);
    this.element = byId("engine-view");
    this.element.append(make("div.content", {},
      make("div.top", {}, make("h1", {}, "Engine"), this.picker, this.status), this.figures,
      part("KV cache", this.blocks.element), part("Steps", this.steps.element),
      part("Requests", make("div.columns", {}, this.table.element, this.story.element))));
    document.addEventListener("visibilitychange", () => this.#update());
    window.addEventListener("resize", () => this.#drawSoon());
    this.isOpen = false;
  }

  /** @param {boolean} isOpen */
  toggle(isOpen) {
    this.isOpen = isOpen;
    this.element.hidden = !isOpen;
    this.#update();
  }

  /** Watch while the view is seen, and only then. */
  #update() {
    const isSeen = this.isOpen && !document.hidden;
    if (isSeen && !this.stop) {
      this.stop = new AbortController();
      this.#watch(this.stop.signal);
      this.refresher = setInterval(() => { if (!this.story.isOver) this.story.refresh(); }, REFRESH_MS);
    } else if (!isSeen && this.stop) {
      this.stop.abort();
      this.stop = undefined;
      clearInterval(this.refresher);
    }
  }

  /** @param {AbortSignal} signal */
  async #watch(signal) {
    while (!signal.aborted) {
      try {
        for await (const event of watchEngine(signal)) this.#on(event);
        this.status.textContent = "the server ends";
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error instanceof ServerError && error.status < 500;
        this.status.textContent = isRefused ? error.message : "no answer from the server; trying again";
        if (isRefused && error.status !== 401) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #on(event) {
    if (!this.engines.has(event.engine)) {
      this.engines.set(event.engine, new EngineState());
      const ranks = [...this.engines.keys()].sort((one, other) => one - other), { value } = this.picker;
      this.picker.replaceChildren(...ranks.map((rank) => make("option", { value: String(rank) }, `Engine ${rank}`)));
      this.picker.value = value || String(ranks[0]);
      this.picker.hidden = ranks.length < 2;
    }
    this.engines.get(event.engine)?.apply(event);
    if (String(event.engine) === this.picker.value) this.#drawSoon();
  }

  #drawSoon() {
    if (!this.isOpen || this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; this.#draw(); });
  }

  #draw() {
    const state = this.engines.get(Number(this.picker.value));
    if (!state) return;
    this.status.textContent = state.isUp ? `watching takes ${percent(state.watchShare)} of the engine’s time` : "this engine gives no answer: it is being started again, or is gone";
    this.element.dataset.live = String(state.isUp);
    this.#drawFigures(state);
    this.blocks.draw(state, this.chosen);
    this.steps.draw(state.steps);
    this.table.draw(state, this.chosen);
  }

  /** @param {EngineState} state */
  #drawFigures(state) {
    const { outputRate, promptRate, firstToken, interToken, hitRate, acceptance, preemptions } = state.figures();
    const counts = state.blockCounts(), all = state.holders.length;
    const running = state.rows.filter((row) => !["waiting", "preempted"].includes(row.phase)).length;
    const both = (value) => (value ? `${seconds(value.half)} · ${seconds(value.most)}` : "–");
    /** @type {[string, string, string][]} */
    const figures = [
      ["output", `${rate(outputRate)}/s`, "tokens written in the last 3 seconds"],
      ["prompts", `${rate(promptRate)}/s`, "tokens read in the last 3 seconds"],
      ["first token", both(firstToken), "median and 95th percentile of the last requests"],
      ["between tokens", both(interToken), "median and 95th percentile of the last 200 steps"],
      ["running · waiting", `${running} · ${state.rows.length - running}`, "requests"],
      ["KV cache", all ? percent(counts.used / all) : "–", "of the blocks in use"],
      ["prefix hits", percent(hitRate), "of the tokens looked up since the start"],
      ["drafts accepted", percent(acceptance), "of the draft tokens since the start"],
      ["preemptions", `${preemptions}`, "since the start"],
      ["restarts", `${state.restarts}`, "of the engine’s process"],
    ];
    const fresh = figures.flatMap(([name, value, what]) => make("div", { title: what }, make("dt", {}, name), make("dd", {}, value)));
    fresh.forEach((each, index) => {
      const there = this.figures.children[index];
      if (!there) this.figures.append(each);
      else if (there.textContent !== each.textContent) there.replaceWith(each);
    });
  }

  /** @param {number} number */
  #chooseNumber(number) {
    const request = this.table.shown.get(number);
    if (request?.is_own) this.#choose(request);
  }

  /** @param {import("./engine_state.js").Request|null} request */
  #choose(request) {
    if (request && request.number === this.chosen) request = null;
    this.chosen = request ? request.number : null;
    if (request) this.story.open(request.id);
    else this.story.close();
    this.#drawSoon();
  }
}
