/** The tokens of an answer, coloured by their probability; the alternatives of one are shown when it is pointed at. */

import { make } from "./dom.js";

/** @typedef {import("./conversations.js").TokenChance} TokenChance */

/**
 * @param {TokenChance[]} chances
 * @returns {HTMLElement}
 */
export function chancesView(chances) {
  const bubble = make("div.chances-bubble", { id: `chances-${Math.random().toString(36).slice(2)}`, role: "tooltip", hidden: true });
  const tokens = chances.flatMap((chance, index) => tokenNodes(chance, index, bubble.id));
  const view = make("div.chances", { role: "group", "aria-label": "Tokens with their probabilities; arrow keys go from one to the next" }, tokens, bubble);
  const spans = [...view.querySelectorAll("span.token")];
  let current = 0;
  const show = (span) => {
    const index = spans.indexOf(span);
    if (index < 0) return;
    bubble.replaceChildren(...bubbleContent(chances[index]));
    bubble.hidden = false;
    const [box, place] = [view.getBoundingClientRect(), span.getClientRects()[0] ?? span.getBoundingClientRect()];
    bubble.style.left = `${Math.max(0, Math.min(place.left - box.left, box.width - bubble.offsetWidth))}px`;
    bubble.style.top = `${place.bottom - box.top + 6}px`;
  };
  const hide = () => { bubble.hidden = true; };
  view.addEventListener("mouseover", (event) => show(/** @type {Element} */ (event.target).closest("span.token")));
  view.addEventListener("mouseleave", hide);
  view.addEventListener("focusin", (event) => show(event.target));
  view.addEventListener("focusout", hide);
  view.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    spans[current].tabIndex = -1;
    current = Math.max(0, Math.min(spans.length - 1, spans.indexOf(document.activeElement) + step));
    spans[current].tabIndex = 0;
    spans[current].focus();
  });
  return view;
}

/** @param {TokenChance} chance @param {number} index @param {string} bubble */
function tokenNodes({ token, logprob }, index, bubble) {
  const chance = Math.exp(logprob);
  const level = chance > 0.9 ? 0 : chance > 0.6 ? 1 : chance > 0.3 ? 2 : chance > 0.1 ? 3 : 4;
  const text = token.replace(/\n/g, "↵");
  const span = make(`span.token.level-${level}`, { tabindex: index ? "-1" : "0", role: "button", "aria-describedby": bubble, "aria-label": `${JSON.stringify(token)}, ${percent(logprob)}` }, text);
  return token.includes("\n") ? [span, make("br")] : [span];
}

/** @param {TokenChance} chance */
function bubbleContent({ token, logprob, top }) {
  const others = top.some((each) => each.token === token) ? top : [{ token, logprob }, ...top];
  return others.map((each) => make(each.token === token ? "div.row.chosen" : "div.row", {},
    make("code", {}, JSON.stringify(each.token).slice(1, -1).replace(/ /g, "␣")),
    make("meter", { min: 0, max: 1, value: Math.exp(each.logprob), "aria-hidden": "true" }),
    make("span", {}, percent(each.logprob))));
}

/** @param {number} logprob */
function percent(logprob) {
  const chance = 100 * Math.exp(logprob);
  return `${chance >= 99.95 ? "100" : chance.toFixed(chance < 1 ? 2 : 1)} %`;
}
