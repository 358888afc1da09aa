/** Numbers, times and colours as the engine's view shows them. */

const GOLDEN_ANGLE = 137.508;

/** @param {number} number  Of a request. */
export function colour(number) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const { theme } = document.documentElement.dataset;
  const lightness = theme === "dark" || (theme !== "light" && isDark) ? 62 : 46;
  return `hsl(${Math.round((number * GOLDEN_ANGLE) % 360)} 58% ${lightness}%)`;
}

/** A colour of the style sheet. @param {string} name */
export function styleColour(name) {
  return resolve(`var(${name})`);
}

/** Canvas takes no light-dark(): the browser works it out on an element. @param {string} value */
function resolve(value) {
  const probe = document.createElement("i");
  probe.style.color = value;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** @param {number|null|undefined} value */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${value * 1000 >= 10 ? Math.round(value * 1000) : (value * 1000).toFixed(1)} ms`;
}

/** @param {number} value */
export function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

/** @param {number|null} value */
export function percent(value) {
  return value === null ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

/** @param {number} count @param {string} what */
export function counted(count, what) {
  return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}

/**
 * Make a canvas as sharp as the screen.
 * @param {HTMLCanvasElement} canvas
 * @param {number} height  In CSS pixels; the width is that of its box.
 */
export function sharp(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}
