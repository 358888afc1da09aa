/** What commands of LaTeX's mathematics stand for. */

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((entry) => entry.split(":")));

/** Identifiers. @type {Record<string, string>} */
export const LETTERS = pairs(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ
  omicron:ο pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ
  Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ
  emptyset:∅ varnothing:∅ imath:ı jmath:ȷ wp:℘ angle:∠ top:⊤ bot:⊥ degree:° forall:∀ exists:∃ nexists:∄ triangle:△ square:□
  blacksquare:■ checkmark:✓ dagger:† ddagger:‡ hslash:ℏ mho:℧ beth:ℶ complement:∁ sharp:♯ flat:♭ natural:♮ S:§ P:¶ pounds:£
  prime:′ ldots:… dots:… cdots:⋯ vdots:⋮ ddots:⋱ dotsc:… dotsb:⋯ dotsm:⋯`);

/** Operators and relations. @type {Record<string, string>} */
export const OPERATORS = pairs(`
  times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ oslash:⊘ odot:⊙ cap:∩ cup:∪ setminus:∖
  wedge:∧ land:∧ vee:∨ lor:∨ neg:¬ lnot:¬ leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ equiv:≡ approx:≈ cong:≅ sim:∼ simeq:≃ propto:∝ ll:≪
  gg:≫ prec:≺ succ:≻ preceq:⪯ succeq:⪰ subset:⊂ supset:⊃ subseteq:⊆ supseteq:⊇ subsetneq:⊊ supsetneq:⊋ in:∈ ni:∋ notin:∉ mid:∣
  nmid:∤ parallel:∥ perp:⊥ to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔
  implies:⟹ impliedby:⟸ iff:⟺ mapsto:↦ longmapsto:⟼ longrightarrow:⟶ longleftarrow:⟵ Longrightarrow:⟹ uparrow:↑ downarrow:↓
  updownarrow:↕ Uparrow:⇑ Downarrow:⇓ nearrow:↗ searrow:↘ hookrightarrow:↪ hookleftarrow:↩ rightleftharpoons:⇌ leadsto:⇝
  models:⊨ vdash:⊢ dashv:⊣ curlyeqprec:⋞ lll:⋘ ggg:⋙ nleq:≰ ngeq:≱ nless:≮ ngtr:≯ nsim:≁ ncong:≇ nparallel:∦ nvdash:⊬ Vdash:⊩ vDash:⊨
  trianglelefteq:⊴ trianglerighteq:⊵ vartriangleleft:⊲ vartriangleright:⊳ subseteqq:⫅ supseteqq:⫆ eqqcolon:≕ longleftrightarrow:⟷
  Longleftrightarrow:⟺ Longleftarrow:⟸ twoheadrightarrow:↠ rightharpoonup:⇀ leftharpoonup:↼ rightleftarrows:⇄ circlearrowleft:↺
  curvearrowright:↷ boxplus:⊞ boxtimes:⊠ diamond:⋄ wr:≀ therefore:∴ because:∵ coloneqq:≔ triangleq:≜ doteq:≐ asymp:≍ bowtie:⋈ amalg:⨿ uplus:⊎
  colon:∶ sqcap:⊓ sqcup:⊔ sqsubseteq:⊑ sqsupseteq:⊒ lesssim:≲ gtrsim:≳ leqslant:⩽ geqslant:⩾ nsubseteq:⊈ ltimes:⋉ rtimes:⋊ dagger:†
  backslash:\\ lt:< gt:> And:& Vert:‖ vert:| lbrace:{ rbrace:} langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lvert:|
  rvert:| lVert:‖ rVert:‖ lbrack:[ rbrack:] ulcorner:⌜ urcorner:⌝`);

/** Operators whose limits stand above and below where there is room. @type {Record<string, string>} */
export const BIG_OPERATORS = pairs(`
  sum:∑ prod:∏ coprod:∐ bigcap:⋂ bigcup:⋃ bigvee:⋁ bigwedge:⋀ bigoplus:⨁ bigotimes:⨂ bigodot:⨀ biguplus:⨄ bigsqcup:⨆`);

/** @type {Record<string, string>} */
export const INTEGRALS = pairs("int:∫ iint:∬ iiint:∭ oint:∮ oiint:∯ intop:∫");

/** Names of functions; those of LIMITS take what is below them there. */
export const FUNCTIONS = new Set(`arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan tanh
  argmax argmin det gcd inf lim liminf limsup max min Pr sup injlim projlim`.trim().split(/\s+/));
export const LIMITS = new Set("argmax argmin det gcd inf lim liminf limsup max min Pr sup injlim projlim".split(" "));

/** Marks above a letter. @type {Record<string, string>} */
export const ACCENTS = pairs(`
  hat:^ widehat:^ bar:¯ overline:¯ vec:→ overrightarrow:→ overleftarrow:← overleftrightarrow:↔ overparen:⏜ overbracket:⎴ dot:˙ ddot:¨ dddot:⃛ tilde:~ widetilde:~ check:ˇ breve:˘
  acute:´ grave:\` mathring:˚ overbrace:⏞`);
/** Marks below. @type {Record<string, string>} */
export const UNDER_ACCENTS = pairs("underline:_ underbrace:⏟ underbar:_ underbracket:⎵ underparen:⏝ underrightarrow:→ underleftarrow:←");

/** Widths of spaces. @type {Record<string, string>} */
export const SPACES = {
  ",": "0.167em", ":": "0.222em", ">": "0.222em", ";": "0.278em", "!": "-0.167em", " ": "0.25em", quad: "1em", qquad: "2em",
  thinspace: "0.167em", medspace: "0.222em", thickspace: "0.278em", enspace: "0.5em", nobreakspace: "0.25em", space: "0.25em",
};

/** Left and right marks of environments that are tables. @type {Record<string, [string, string]>} */
export const MATRICES = {
  matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"], cases: ["{", ""], rcases: ["", "}"], array: ["", ""], aligned: ["", ""], alignedat: ["", ""], split: ["", ""],
  gathered: ["", ""], align: ["", ""], "align*": ["", ""], alignat: ["", ""], "alignat*": ["", ""], gather: ["", ""],
  "gather*": ["", ""], equation: ["", ""], "equation*": ["", ""], multline: ["", ""], "multline*": ["", ""], eqnarray: ["", ""],
  "eqnarray*": ["", ""], subarray: ["", ""],
};

/** First code point of A, of a and of 0 in each alphabet; null where there is none. @type {Record<string, (number|null)[]>} */
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce], bm: [0x1d468, 0x1d482, 0x1d7ce],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8], mathcal: [0x1d49c, 0x1d4b6, null], mathscr: [0x1d49c, 0x1d4b6, null],
  mathfrak: [0x1d504, 0x1d51e, null], mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2], mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
};
/** Letters that Unicode had before it had their alphabets. @type {Record<string, string>} */
const EXCEPTIONS = {
  "mathbb C": "ℂ", "mathbb H": "ℍ", "mathbb N": "ℕ", "mathbb P": "ℙ", "mathbb Q": "ℚ", "mathbb R": "ℝ", "mathbb Z": "ℤ",
  "mathcal B": "ℬ", "mathcal E": "ℰ", "mathcal F": "ℱ", "mathcal H": "ℋ", "mathcal I": "ℐ", "mathcal L": "ℒ", "mathcal M": "ℳ",
  "mathcal R": "ℛ", "mathcal e": "ℯ", "mathcal g": "ℊ", "mathcal o": "ℴ", "mathfrak C": "ℭ", "mathfrak H": "ℌ",
  "mathfrak I": "ℑ", "mathfrak R": "ℜ", "mathfrak Z": "ℨ",
};

/** Whether letters have an alphabet of this name. @param {string} name */
export function isAlphabet(name) {
  return Object.hasOwn(ALPHABETS, name);
}

/**
 * @param {string} char
 * @param {string} alphabet
 * @returns {string} The letter in that alphabet, or itself where it has none.
 */
export function styled(char, alphabet) {
  const exception = EXCEPTIONS[`${alphabet.replace("mathscr", "mathcal")} ${char}`];
  if (exception) return exception;
  const [upper, lower, digit] = ALPHABETS[alphabet];
  const code = char.charCodeAt(0);
  if (/[A-Z]/.test(char)) return String.fromCodePoint(upper + code - 65);
  if (/[a-z]/.test(char)) return String.fromCodePoint(lower + code - 97);
  if (/\d/.test(char) && digit !== null) return String.fromCodePoint(digit + code - 48);
  if (/[α-ω]/.test(char) && /bold|bm/.test(alphabet)) return String.fromCodePoint(0x1d736 + code - 0x3b1);
  return char;
}
