/** Why a request took as long as it did: its timeline, and sentences. */

import { fetchExplanation } from "./api.js";
import { iconButton, make } from "./dom.js";
import { seconds } from "./engine_format.js";

export class RequestStory {
  /** @param {() => void} closed */
  constructor(closed) {
    this.title = make("h3");
    this.content = make("div");
    this.element = make("section.story", { "aria-label": "Explanation of a request", hidden: true, tabIndex: -1 },
      make("header", {}, this.title, iconButton("close", "Close the explanation", () => { this.close(); closed(); })), this.content);
    /** @type {string|null} */
    this.id = null;
  }

  /** @param {string} id */
  async open(id) {
    const isOther = this.id !== id;
    this.id = id;
    this.element.hidden = false;
    this.title.textContent = id;
    if (isOther) {
      this.content.replaceChildren(make("p", {}, "…"));
      this.element.focus();
    }
    await this.refresh();
  }

  close() {
    this.id = null;
    this.element.hidden = true;
  }

  /** Ask again: it may have gone on. */
  async refresh() {
    const { id } = this;
    if (id === null) return;
    try {
      const { requests } = await fetchExplanation(id);
      if (this.id !== id) return;
      this.isOver = requests.every((each) => each.status === "finished");
      this.content.replaceChildren(...requests.flatMap((each) => told(each, requests.length > 1)));
    } catch (error) {
      if (this.id === id) this.content.replaceChildren(make("p.none", {}, error.message));
      this.isOver = true;
    }
  }
}

/** @param {any} request @param {boolean} isNamed */
function told(request, isNamed) {
  return [
    isNamed ? make("h4", {}, request.engine_request_id) : "",
    track(request),
    make("ul.sentences", {}, ...request.sentences.map((text) => make("li", {}, text))),
    make("details", {}, make("summary", {}, "Timeline"), make("ol.marks", {}, ...request.timeline.map((mark) => make("li", {}, make("span", {}, seconds(mark.s)), ` ${markText(mark)}`)))),
  ].filter((each) => each !== "");
}

function markText(mark) {
  if (mark.event === "chunk") return `tokens ${mark.start} to ${mark.start + mark.num_tokens - 1} of the prompt`;
  return mark.event === "finished" ? `finished (${mark.reason})` : mark.event;
}

/** A bar of its life: waiting, reading, writing. @param {any} request */
function track(request) {
  const { queue_s: queue, prefill_s: prefill, decode_s: decode, total_s: total } = request.numbers;
  /** @type {[string, number, string][]} */
  const parts = [["queue", queue, "waiting"], ["prefill", prefill, "reading"], ["decode", decode, "writing"]];
  const label = parts.map(([, length, text]) => `${text} ${seconds(length)}`).join(", ");
  const bar = make("div.track", { role: "img", "aria-label": label });
  for (const [name, length, text] of parts) {
    if (length <= 0) continue;
    const part = make(`span.${name}`, { title: `${text} ${seconds(length)}` });
    part.style.flexGrow = String(Math.max(length / Math.max(total, 1e-6), 0.005));
    bar.append(part);
  }
  const legend = make("ul.legend", {}, ...parts.map(([name, length, text]) => make("li", {}, make(`i.${name}`, { "aria-hidden": "true" }), `${text} ${seconds(length)}`)));
  return make("div", {}, bar, legend);
}
