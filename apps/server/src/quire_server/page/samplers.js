/**
 * Fields of a request that a user may set: their names on the page, their groups, and how what is typed becomes JSON.
 *
 * Numbers and their ranges come from the server; one that has no entry here is shown under its own name.
 */

/** @typedef {{name: string, label: string, help: string, group: string, kind: string, placeholder?: string, low?: number, high?: number}} Field */

export const GROUPS = ["Sampling", "Thinking", "Length and stops", "Penalties", "Repetition (DRY)", "Other samplers", "Tokens", "Anything else"];

/** Name -> label, group, help. @type {Record<string, [string, string, string]>} */
const NUMBERS = {
  temperature: ["Temperature", "Sampling", "0 always takes the most likely token; more is more varied"],
  top_p: ["Top p", "Sampling", "Keep the likeliest tokens that reach this probability together"],
  top_k: ["Top k", "Sampling", "Keep this many of the likeliest tokens; 0 keeps all"],
  min_p: ["Min p", "Sampling", "Keep tokens at least this likely beside the likeliest"],
  seed: ["Seed", "Sampling", "The same seed gives the same answer"],
  min_tokens: ["Fewest tokens to write", "Length and stops", "No end before so many tokens"],
  presence_penalty: ["Presence penalty", "Penalties", "Against tokens that were written before"],
  frequency_penalty: ["Frequency penalty", "Penalties", "Against tokens, by how often they were written"],
  repetition_penalty: ["Repetition penalty", "Penalties", "Against tokens of the prompt and the answer; 1 is none"],
  dry_multiplier: ["Strength", "Repetition (DRY)", "0 switches it off"],
  dry_base: ["Base", "Repetition (DRY)", "Growth with each repeated token"],
  dry_allowed_length: ["Allowed length", "Repetition (DRY)", "Tokens that may be repeated freely"],
  dry_range: ["Range", "Repetition (DRY)", "Latest tokens to look at; 0 is all"],
  top_n_sigma: ["Top n σ", "Other samplers", "Keep logits within so many standard deviations of the largest"],
  typical_p: ["Typical p", "Other samplers", "Keep the tokens of typical surprise; 1 keeps all"],
  xtc_probability: ["XTC probability", "Other samplers", "How often the likeliest choices are left out"],
  xtc_threshold: ["XTC threshold", "Other samplers", "Which count as likely"],
  dynatemp_range: ["Dynamic temperature range", "Other samplers", "How far the temperature moves; 0 fixes it"],
  dynatemp_exponent: ["Dynamic temperature exponent", "Other samplers", "Form of the movement"],
  mirostat_mode: ["Mirostat", "Other samplers", "0 is off; 1 and 2 are its versions"],
  mirostat_tau: ["Mirostat τ", "Other samplers", "Surprise per token to hold, in bits"],
  mirostat_eta: ["Mirostat η", "Other samplers", "How fast it learns"],
};

/** @type {Field[]} */
const OTHERS = [
  { name: "max_completion_tokens", label: "Most tokens to write", group: "Length and stops", kind: "whole", help: "Up to the end of the context when empty", placeholder: "no bound" },
  { name: "stop", label: "Stop at", group: "Length and stops", kind: "lines", help: "One text per line; \\n is a line break" },
  { name: "stop_token_ids", label: "Stop at token ids", group: "Length and stops", kind: "ids", help: "Separated by commas" },
  { name: "ignore_eos", label: "Go on past the end token", group: "Length and stops", kind: "switch", help: "" },
  { name: "include_stop_str_in_output", label: "Keep the stop text", group: "Length and stops", kind: "switch", help: "" },
  { name: "truncate_prompt_tokens", label: "Most tokens of the prompt", group: "Length and stops", kind: "whole", help: "Cuts long conversations; -1 keeps what fits" },
  { name: "truncation_side", label: "Cut the", group: "Length and stops", kind: "choice left right", help: "left drops the oldest tokens" },
  { name: "enable_thinking", label: "Think first", group: "Thinking", kind: "choice on off", help: "For models that can do both" },
  { name: "reasoning_effort", label: "Effort", group: "Thinking", kind: "choice none minimal low medium high", help: "For models that know efforts" },
  { name: "thinking_token_budget", label: "Most tokens of thinking", group: "Thinking", kind: "whole", help: "" },
  { name: "dry_sequence_breakers", label: "Breakers", group: "Repetition (DRY)", kind: "lines", help: "One text per line, over which no repetition reaches" },
  { name: "logit_bias", label: "Logit bias", group: "Tokens", kind: "json", help: "Token id to number, as JSON: {\"42\": -100}" },
  { name: "bad_words", label: "Words not to write", group: "Tokens", kind: "lines", help: "One per line" },
  { name: "allowed_token_ids", label: "Only these token ids", group: "Tokens", kind: "ids", help: "Separated by commas" },
  { name: "skip_special_tokens", label: "Hide special tokens", group: "Tokens", kind: "choice on off", help: "On unless it is switched off" },
  { name: "deterministic", label: "Refuse what cannot be repeated", group: "Tokens", kind: "switch", help: "Needs a seed, or temperature 0" },
  { name: "chat_template_kwargs", label: "Variables of the chat template", group: "Anything else", kind: "json", help: "An object, as JSON" },
  { name: "other", label: "More fields of the request", group: "Anything else", kind: "json", help: "An object, as JSON; they win over all others" },
];

export const PRESETS = {
  "Model's own": {},
  Precise: { temperature: "0" },
  Balanced: { temperature: "0.7", top_p: "0.95" },
  Creative: { temperature: "1.1", min_p: "0.05" },
};

/** @param {import("./api.js").ChatSettings} offered @returns {Field[]} */
export function fieldsOf(offered) {
  const numbers = offered.sampling.map((number) => {
    const [label, group, help] = NUMBERS[number.name] ?? [number.name, "Other samplers", ""];
    const value = offered.defaults[number.name] ?? number.default;
    return {
      name: number.name, label, group, help, kind: number.whole ? "whole" : "number", low: number.low, high: number.high,
      placeholder: value === null ? "random" : String(value),
    };
  });
  return [...numbers, ...OTHERS];
}

/**
 * What is typed as fields of a request.
 * @param {Record<string, string>} values  Name of a field -> what is typed.
 * @param {Field[]} fields
 * @returns {Record<string, any>}
 * @throws {Error} Naming the field at fault.
 */
export function requestFields(values, fields) {
  /** @type {Record<string, any>} */
  const result = {};
  for (const { name, label, kind } of fields) {
    const text = values[name] ?? "";
    if (text.trim()) result[name] = parsed(text, kind, label);
  }
  const { enable_thinking: thinks, other, ...rest } = result;
  if (thinks !== undefined) rest.chat_template_kwargs = { enable_thinking: thinks, thinking: thinks, ...rest.chat_template_kwargs };
  return { ...rest, ...other };
}

/** @param {string} text @param {string} kind @param {string} label */
function parsed(text, kind, label) {
  switch (kind.split(" ")[0]) {
    case "whole": case "number": {
      const number = Number(text);
      if (!Number.isFinite(number) || (kind === "whole" && !Number.isInteger(number))) throw new Error(`${label}: ${text} is no ${kind === "whole" ? "whole " : ""}number`);
      return number;
    }
    case "lines": return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    case "ids": return text.split(/[\s,]+/).filter(Boolean).map((each) => {
      if (!/^\d+$/.test(each)) throw new Error(`${label}: ${each} is no token id`);
      return Number(each);
    });
    case "json": {
      let value;
      try { value = JSON.parse(text); } catch (error) { throw new Error(`${label}: ${error.message}`); }
      if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error(`${label}: it must be an object, like {"name": 1}`);
      return value;
    }
    case "choice": return text === "on" ? true : text === "off" ? false : text;
    default: return text === "true";
  }
}

/** Kinds of forms that an answer may be held to. @type {[string, string, string][]} */
export const FORMS = [
  ["", "Free text", ""],
  ["json_object", "Any JSON", ""],
  ["json_schema", "JSON schema", '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'],
  ["regex", "Pattern", "\\d{4}-\\d{2}-\\d{2}"],
  ["grammar", "Grammar (Lark or GBNF)", 'start: "yes" | "no"'],
  ["choice", "One of these lines", "yes\nno"],
];

/**
 * @param {{kind: string, text: string}} form
 * @returns {Record<string, any>} Fields of a request.
 * @throws {Error} The schema is no JSON.
 */
export function formFields({ kind, text }) {
  if (!kind || (kind !== "json_object" && !text.trim())) return {};
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (kind === "json_schema") {
    let schema;
    try { schema = JSON.parse(text); } catch (error) { throw new Error(`JSON schema: ${error.message}`); }
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
  }
  return { structured_outputs: { [kind]: kind === "choice" ? text.split("\n").filter((line) => line.trim()) : text } };
}
