/** What the engine has told: steps, requests, rows and holders of blocks, and figures made of them. */

const NUM_STEPS = 200, NUM_FINISHED = 50, RATE_S = 3;
/** Fields of a step, in the order in which they come. */
const STEP = ["number", "at", "seconds", "prefill", "decode", "draft", "accepted", "prefillRows", "decodeRows", "running", "waiting", "used"];
const ROW = ["number", "phase", "computed", "output", "blocks"];

/**
 * @typedef {{number: number, at: number, seconds: number, prefill: number, decode: number, draft: number, accepted: number,
 *   prefillRows: number, decodeRows: number, running: number, waiting: number, used: number}} Step
 * @typedef {{number: number, phase: string, computed: number, output: number, blocks: number}} Row
 * @typedef {Record<string, any>} Request
 */

/** One engine, as far as it was told. */
export class EngineState {
  constructor() {
    this.isUp = false;
    this.time = 0;
    this.blockSize = 0;
    /** Of each block: 0 free, -1 cached, 1 shared, n or -n of request n. */
    this.holders = new Int32Array(0);
    /** @type {Step[]} */
    this.steps = [];
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Map<number, Request>} */
    this.requests = new Map();
    /** @type {Request[]} */
    this.finished = [];
    /** @type {Record<string, number>} */
    this.waitingReasons = {};
    /** @type {Record<string, number>} */
    this.totals = {};
    this.watchShare = 0;
    this.restarts = 0;
  }

  /** @param {any} event */
  apply(event) {
    this.isUp = event.state === "up";
    if (!this.isUp) return;
    if (event.anew) {
      this.holders = Int32Array.from(event.holders);
      this.steps = [];
      this.requests.clear();
      this.finished = [];
    }
    for (const [block, holder] of event.changes ?? []) this.holders[block - 1] = holder;
    this.steps = [...this.steps, ...event.steps.map((each) => named(STEP, each))].slice(-NUM_STEPS);
    for (const request of event.requests) {
      if (request.finished_at) {
        this.requests.delete(request.number);
        this.finished = [request, ...this.finished].slice(0, NUM_FINISHED);
      } else this.requests.set(request.number, request);
    }
    this.rows = event.rows.map((each) => named(ROW, each));
    Object.assign(this, { time: event.time, blockSize: event.block_size, waitingReasons: event.waiting_reasons, totals: event.totals, watchShare: event.watch_share, restarts: event.num_restarts });
  }

  /** Numbers of blocks by what they hold. */
  blockCounts() {
    const counts = { used: 0, cached: 0, free: 0 };
    for (const holder of this.holders) {
      if (holder === 0) counts.free++;
      else if (holder === -1) counts.cached++;
      else counts.used++;
    }
    return counts;
  }

  /** Figures of this moment; null where nothing is known. */
  figures() {
    const recent = this.steps.filter((step) => step.at > this.time - RATE_S);
    const seconds = recent.length ? Math.max(Math.min(RATE_S, this.time - recent[0].at), 0.2) : 1;
    const sum = (/** @type {(step: Step) => number} */ value) => recent.reduce((total, step) => total + value(step), 0);
    const first = [...this.requests.values(), ...this.finished].filter((each) => each.first_token_at).map((each) => each.first_token_at - each.queued_at);
    return {
      outputRate: sum((step) => step.decode + step.accepted) / seconds,
      promptRate: sum((step) => step.prefill) / seconds,
      firstToken: percentiles(first.map((value) => [value, 1])),
      interToken: percentiles(this.#intervals()),
      hitRate: share(this.totals.prefix_cache_hit_tokens_total, this.totals.prefix_cache_query_tokens_total),
      acceptance: share(this.totals.num_accepted_tokens_total, this.totals.num_draft_tokens_total),
      preemptions: this.totals.num_preemptions_total ?? 0,
    };
  }

  /** [seconds between two tokens, requests that waited so long] of the steps. */
  #intervals() {
    const intervals = [];
    for (let index = 1; index < this.steps.length; index++) {
      const [former, step] = [this.steps[index - 1], this.steps[index]];
      if (step.decodeRows && former.decodeRows) intervals.push([step.at + step.seconds - former.at - former.seconds, step.decodeRows]);
    }
    return intervals;
  }
}

/** @param {string[]} names @param {any[]} values */
function named(names, values) {
  return /** @type {any} */ (Object.fromEntries(names.map((name, index) => [name, values[index]])));
}

/** @param {number|undefined} part @param {number|undefined} whole */
function share(part, whole) {
  return whole ? (part ?? 0) / whole : null;
}

/**
 * @param {number[][]} weighted  [value, weight]
 * @returns {{half: number, most: number}|null}  50th and 95th percentile.
 */
function percentiles(weighted) {
  if (!weighted.length) return null;
  const sorted = [...weighted].sort((one, other) => one[0] - other[0]);
  const total = sorted.reduce((sum, [, weight]) => sum + weight, 0);
  const at = (/** @type {number} */ fraction) => {
    let left = fraction * total;
    for (const [value, weight] of sorted) {
      left -= weight;
      if (left <= 0) return value;
    }
    return sorted[sorted.length - 1][0];
  };
  return { half: at(0.5), most: at(0.95) };
}
