/** Requests of the engine: those that run, those that wait, and the last ones that ended. */

import { make, morph } from "./dom.js";
import { colour, seconds } from "./engine_format.js";

const WAITS = {
  adapter_slots: "an adapter's place", capacity: "room", grammar: "its grammar", kv_connector: "another engine", kv_loading: "a KV tier", max_num_seqs: "a row", max_running_per_tenant: "its tenant's rows", media: "towers",
  paused: "the end of a pause", shared_prompt: "the same prompt", tenant_share: "its tenant's share", tokens_in_flight: "its last token", encoder: "the encoder",
};

export class RequestTable {
  /** @param {(request: import("./engine_state.js").Request) => void} choose */
  constructor(choose) {
    this.choose = choose;
    this.body = make("tbody");
    this.none = make("p.none", {}, "No request yet.");
    const head = ["Request", "Phase", "Prompt", "Output", "Blocks", "Time"].map((text, index) => make(`th.c${index}`, { scope: "col" }, text));
    this.table = make("table", {}, make("caption.offscreen", {}, "Requests"), make("thead", {}, make("tr", {}, ...head)), this.body);
    this.element = make("div.requests", {}, this.table, this.none);
    // Rows change while they are shown, so that one listener serves all.
    this.element.addEventListener("click", (event) => {
      const button = /** @type {Element} */ (event.target).closest("button[data-number]");
      const request = button && this.shown.get(Number(/** @type {HTMLElement} */ (button).dataset.number));
      if (request) this.choose(request);
    });
    /** @type {Map<number, import("./engine_state.js").Request>} */
    this.shown = new Map();
  }

  /** @param {import("./engine_state.js").EngineState} state @param {number|null} chosen */
  draw(state, chosen) {
    this.shown.clear();
    const rows = [];
    for (const row of state.rows) {
      const request = state.requests.get(row.number);
      if (request) rows.push(this.#row(request, row, state.time, chosen));
    }
    for (const request of state.finished) rows.push(this.#row(request, null, state.time, chosen));
    morph(this.body, make("tbody", {}, rows));
    this.table.hidden = !rows.length;
    this.none.hidden = rows.length > 0;
    for (const swatch of this.body.querySelectorAll("i")) /** @type {HTMLElement} */ (swatch).style.background = colour(Number(/** @type {HTMLElement} */ (swatch).dataset.number));
  }

  #row(request, row, time, chosen) {
    this.shown.set(request.number, request);
    const { number } = request, isOver = row === null;
    const phase = isOver ? request.finish_reason ?? "ended" : row.phase;
    const wait = row && request.wait_reason ? ` for ${WAITS[request.wait_reason] ?? request.wait_reason}` : "";
    const reading = row?.phase === "prefill" ? `${row.computed} / ${request.num_prompt_tokens}` : `${request.num_prompt_tokens}`;
    const name = request.is_own ? request.id : "another caller’s";
    const label = make("button.link", { type: "button", "data-number": number, "aria-pressed": String(number === chosen), disabled: !request.is_own }, name);
    const lasted = (request.finished_at ?? time) - request.queued_at;
    return make("tr", { "data-phase": isOver ? "over" : phase },
      make("td.c0", {}, make("i", { "aria-hidden": "true", "data-number": number }), label),
      make("td.c1", {}, phase + wait), make("td.c2", {}, reading), make("td.c3", {}, `${row ? row.output : request.num_output_tokens}`),
      make("td.c4", {}, row ? `${row.blocks}` : "–"), make("td.c5", {}, seconds(lasted)));
  }
}
