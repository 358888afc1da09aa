/**
 * Colours for code in common languages: comments, texts, numbers, keywords, types, calls.
 *
 * Each language is one regular expression of alternatives, tried from left to right, whose groups name the kinds. Nothing
 * here understands a language; what no alternative takes is plain.
 */

/** @typedef {{kind: string, text: string}} Token  Kind "" is plain text. */

const words = (text) => text.trim().split(/\s+/).join("|");

const C_COMMENT = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const HASH_COMMENT = String.raw`#[^\n]*`;
const STRING = String.raw`"(?:\\[\s\S]|[^"\\\n])*"?|'(?:\\[\s\S]|[^'\\\n])*'?`;
const NUMBER = String.raw`\b0[xXbBoO][\da-fA-F_]+\w*|\b\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?\w*`;
const CALL = String.raw`\b[A-Za-z_]\w*(?=\s?\()`;
const TYPE = String.raw`\b[A-Z]\w*\b`;

/** @param {{comment?: string, string?: string, keyword: string, more?: string, flags?: string, literal?: string, plain?: boolean}} parts */
function language({ comment = C_COMMENT, string = STRING, keyword, more = "", flags = "", literal = "true false null", plain = false }) {
  const alternatives = [
    `(?<comment>${comment})`,
    `(?<string>${string})`,
    more,
    `(?<number>${NUMBER})`,
    `(?<keyword>(?<![\\w$.])(?:${words(keyword)})(?![\\w$]))`,
    `(?<literal>\\b(?:${words(literal)})\\b)`,
    plain ? "" : `(?<call>${CALL})`,
    plain ? "" : `(?<type>${TYPE})`,
    "(?<plain>[\\w$]+)",
  ];
  return new RegExp(alternatives.filter(Boolean).join("|"), `g${flags}`);
}

const JAVASCRIPT = language({
  string: `${STRING}|\`(?:\\\\[\\s\\S]|[^\`\\\\])*\`?`,
  keyword: `abstract as async await break case catch class const continue debugger declare default delete do else enum export
    extends finally for from function get if implements import in instanceof interface let namespace new of private protected
    public readonly return satisfies set static super switch this throw try type typeof var void while with yield`,
  literal: "true false null undefined NaN Infinity",
});
const C = language({
  more: "(?<meta>^[ \\t]*#[^\\n]*)",
  flags: "m",
  keyword: `alignas auto bool break case catch char char16_t char32_t class concept const consteval constexpr continue co_await
    co_return co_yield decltype default delete do double else enum explicit export extern final float for friend goto if inline
    int int8_t int16_t int32_t int64_t long mutable namespace new noexcept operator override private protected public register
    requires restrict return short signed size_t sizeof static static_assert struct switch template this throw try typedef
    typename uint8_t uint16_t uint32_t uint64_t union unsigned using virtual void volatile while`,
  literal: "true false nullptr NULL",
});
const JAVA = language({
  more: "(?<meta>@\\w+)",
  string: `"""[\\s\\S]*?(?:"""|$)|${STRING}`,
  keyword: `abstract as assert async await base bool boolean break byte case catch char class const continue data decimal default
    delegate do double else enum event extends final finally float for foreach fun get if implements import in instanceof int
    interface internal is let lock long namespace native new object operator out override package params private protected
    public readonly record ref return sbyte sealed set short static string struct super switch synchronized this throw throws
    transient try typeof uint ulong using val var virtual void volatile when where while with yield`,
});
const BASH = language({
  comment: "(?<=^|\\s)#[^\\n]*",
  string: `"(?:\\\\[\\s\\S]|[^"\\\\])*"?|'[^']*'?`,
  more: "(?<variable>\\$\\{[^}\\n]*\\}?|\\$\\w+|\\$[@*#?$!-])|(?<meta>(?<=\\s)--?[A-Za-z][\\w-]*)",
  flags: "m",
  keyword: `alias break case cd continue declare do done echo elif else esac exit export fi for function if in local read return
    select set shift source sudo then trap unset until while`,
  literal: "true false",
  plain: true,
});

/** @type {Record<string, RegExp>} */
const LANGUAGES = {
  python: language({
    comment: HASH_COMMENT,
    string: `[rRbBfFuU]{0,2}(?:"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|${STRING})`,
    more: "(?<meta>@[\\w.]+)",
    keyword: `and as assert async await break case class continue def del elif else except finally for from global if import in is
      lambda match nonlocal not or pass raise return try type while with yield`,
    literal: "True False None self cls",
  }),
  javascript: JAVASCRIPT,
  c: C,
  java: JAVA,
  go: language({
    string: `${STRING}|\`[^\`]*\`?`,
    keyword: `any bool break byte case chan complex64 complex128 const continue default defer else error fallthrough float32
      float64 for func go goto if import int int8 int16 int32 int64 interface map package range return rune select string struct
      switch type uint uint8 uint16 uint32 uint64 uintptr var`,
    literal: "true false nil iota",
  }),
  rust: language({
    string: `[br]?"(?:\\\\[\\s\\S]|[^"\\\\])*"?|'(?:\\\\.|[^'\\\\\\n])'`,
    more: "(?<meta>#!?\\[[^\\]\\n]*\\]?|'[a-z_]\\w*|\\b\\w+!)",
    keyword: `as async await bool box break char const continue crate dyn else enum extern f32 f64 fn for i8 i16 i32 i64 i128 if
      impl in isize let loop match mod move mut pub ref return self static str struct super trait type u8 u16 u32 u64 u128 union
      unsafe use usize where while`,
    literal: "true false None Some Ok Err",
  }),
  bash: BASH,
  ruby: language({
    comment: `${HASH_COMMENT}|^=begin[\\s\\S]*?(?:^=end|$)`,
    more: "(?<variable>@{1,2}\\w+|\\$\\w+|(?<!:):[A-Za-z_]\\w*[?!]?)",
    flags: "m",
    keyword: `alias and attr_accessor attr_reader attr_writer begin break case class def defined? do else elsif end ensure extend for
      if in include module next not or private protected public raise redo require require_relative rescue retry return self super
      then undef unless until when while yield`,
    literal: "true false nil",
  }),
  php: language({
    comment: `${C_COMMENT}|${HASH_COMMENT}`,
    more: "(?<meta><\\?(?:php|=)?|\\?>)|(?<variable>\\$\\w+)",
    keyword: `abstract and array as break case catch class clone const continue declare default do echo else elseif enum extends final
      finally fn for foreach function global if implements include include_once instanceof interface match namespace new or print
      private protected public readonly require require_once return static switch throw trait try use var while xor yield`,
    literal: "true false null TRUE FALSE NULL",
  }),
  lua: language({
    comment: String.raw`--\[\[[\s\S]*?(?:\]\]|$)|--[^\n]*`,
    string: `\\[\\[[\\s\\S]*?(?:\\]\\]|$)|${STRING}`,
    keyword: "and break do else elseif end for function goto if in local not or repeat return then until while",
    literal: "true false nil self",
  }),
  perl: language({
    comment: HASH_COMMENT,
    more: "(?<variable>[$@%]\\w+)",
    keyword: `and bless die do else elsif eq exit for foreach given if last local lt my ne next no not or our package print printf push
      redo require return say shift sub unless until use when while`,
    literal: "undef",
  }),
  r: language({
    comment: HASH_COMMENT,
    keyword: "break else for function if in library next repeat require return source while",
    literal: "TRUE FALSE NULL NA NaN Inf",
  }),
  julia: language({
    comment: `#=[\\s\\S]*?(?:=#|$)|${HASH_COMMENT}`,
    string: `"""[\\s\\S]*?(?:"""|$)|${STRING}`,
    more: "(?<meta>@\\w+)",
    keyword: `abstract baremodule begin break catch const continue do else elseif end export finally for function global if import in let
      local macro module mutable primitive quote return struct try type using where while`,
    literal: "true false nothing missing Inf NaN",
  }),
  haskell: language({
    comment: String.raw`\{-[\s\S]*?(?:-\}|$)|--[^\n]*`,
    string: String.raw`"(?:\\[\s\S]|[^"\\\n])*"?|'(?:\\.|[^'\\\n])'`,
    keyword: "as case class data default deriving do else family forall hiding if import in infix infixl infixr instance let module newtype of qualified then type where",
    literal: "True False Nothing otherwise",
  }),
  elixir: language({
    comment: HASH_COMMENT,
    string: `"""[\\s\\S]*?(?:"""|$)|${STRING}`,
    more: "(?<meta>@\\w+)|(?<variable>(?<!:):[a-z_]\\w*)",
    keyword: `after alias and case catch cond def defimpl defmacro defmodule defp defprotocol defstruct do else end fn for if import in not or
      quote raise receive require rescue try unless unquote use when with`,
    literal: "true false nil",
  }),
  powershell: language({
    comment: `<#[\\s\\S]*?(?:#>|$)|${HASH_COMMENT}`,
    more: "(?<variable>\\$[\\w:]+)|(?<call>\\b[A-Z]\\w+-[A-Z]\\w+)|(?<meta>(?<=\\s)-[A-Za-z]\\w*)",
    flags: "i",
    keyword: "begin break catch class continue do else elseif end exit filter finally for foreach function if in param process return switch throw trap try until using while",
    literal: "true false null",
    plain: true,
  }),
  lisp: language({
    comment: ";[^\\n]*",
    string: String.raw`"(?:\\[\s\S]|[^"\\])*"?`,
    more: "(?<literal>(?<![\\w-])(?::[\\w-]+|#[tf]\\b))",
    keyword: "begin cond def define defmacro defn defun else fn if lambda let letrec loop ns quote recur require set! setq",
    literal: "nil t true false",
    plain: true,
  }),
  latex: /(?<comment>(?<!\\)%[^\n]*)|(?<keyword>\\(?:begin|end)\b)|(?<call>\\(?:[A-Za-z@]+\*?|.))|(?<string>\$[^$\n]*\$)|(?<type>(?<=\\(?:begin|end)\{)[\w*]+)|(?<literal>[{}&])/g,
  proto: language({
    keyword: `bool bytes double enum extend extensions fixed32 fixed64 float import int32 int64 map message oneof option optional package public
      repeated required reserved returns rpc service sfixed32 sfixed64 sint32 sint64 stream string syntax to uint32 uint64`,
  }),
  graphql: language({
    comment: HASH_COMMENT,
    string: `"""[\\s\\S]*?(?:"""|$)|${STRING}`,
    more: "(?<meta>@\\w+)|(?<variable>\\$\\w+)",
    keyword: "directive enum extend fragment implements input interface mutation on query scalar schema subscription type union",
  }),
  sql: language({
    comment: `--[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)`,
    flags: "i",
    keyword: `add all alter and any as asc begin between by case cast check column commit constraint create cross database default
      delete desc distinct drop else end exists explain foreign from full group having if in index inner insert intersect into is
      join key left like limit not offset on or order outer over partition primary references returning right rollback select set
      table then transaction trigger truncate union unique update using values view when where with`,
    literal: "true false null int integer bigint smallint text varchar char date timestamp boolean numeric real serial",
  }),
  json: /(?<key>"(?:\\.|[^"\\\n])*"(?=\s*:))|(?<string>"(?:\\.|[^"\\\n])*"?)|(?<number>-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?<literal>\b(?:true|false|null)\b)|(?<comment>\/\/[^\n]*)/g,
  html: /(?<comment><!--[\s\S]*?(?:-->|$))|(?<meta><![^>]*>?)|(?<keyword><\/?[A-Za-z][\w:-]*|\/?>)|(?<key>(?<=\s)[A-Za-z_:@][\w:.-]*(?==))|(?<string>"[^"<]*"|'[^'<]*')|(?<literal>&#?\w+;)/g,
  css: /(?<comment>\/\*[\s\S]*?(?:\*\/|$))|(?<string>"[^"\n]*"?|'[^'\n]*'?)|(?<meta>@[\w-]+|!important)|(?<key>(?<![\w-])[\w-]+(?=\s*:[^:{]*[;}\n]))|(?<number>#[\da-fA-F]{3,8}\b|-?\b\d+(?:\.\d+)?(?:%|[a-z]+)?)|(?<variable>--[\w-]+)|(?<type>[.#][A-Za-z][\w-]*)|(?<call>[\w-]+(?=\())/g,
  yaml: /(?<comment>(?<=^|\s)#[^\n]*)|(?<key>(?<=^[ \t-]*)[\w."'/-]+(?=\s*:(?:\s|$)))|(?<string>"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?)|(?<literal>\b(?:true|false|null|yes|no|on|off)\b|~)|(?<number>(?<![\w.-])-?\d+(?:\.\d+)?(?![\w.]))|(?<meta>[&*][\w-]+|^---$)|(?<plain>[\w$]+)/gm,
  diff: /(?<comment>^(?:diff|index|---|\+\+\+)[^\n]*)|(?<meta>^@@[^\n]*)|(?<added>^\+[^\n]*)|(?<removed>^-[^\n]*)/gm,
  toml: /(?<comment>#[^\n]*)|(?<type>^\s*\[[^\]\n]*\]+)|(?<key>^[ \t]*[\w."-]+(?=\s*=))|(?<string>"""[\s\S]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?)|(?<literal>\b(?:true|false)\b)|(?<number>-?\b\d[\w.:+-]*)|(?<plain>[\w$]+)/gm,
};

/** @type {Record<string, string>} */
const ALIASES = {
  py: "python", python3: "python", pycon: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "javascript",
  tsx: "javascript", typescript: "javascript", node: "javascript", "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c", cuda: "c",
  cu: "c", objc: "c", "c#": "java", cs: "java", csharp: "java", kotlin: "java", kt: "java", scala: "java", swift: "java",
  dart: "java", golang: "go", rs: "rust", sh: "bash", shell: "bash", zsh: "bash", console: "bash", dockerfile: "bash",
  makefile: "bash", jsonc: "json", json5: "json", jsonl: "json", xml: "html", svg: "html", vue: "html", htm: "html",
  rb: "ruby", pl: "perl", jl: "julia", hs: "haskell", ex: "elixir", exs: "elixir", ps1: "powershell", pwsh: "powershell",
  clojure: "lisp", clj: "lisp", scheme: "lisp", elisp: "lisp", racket: "lisp", tex: "latex", protobuf: "proto", gql: "graphql", zig: "rust",
  hcl: "toml", terraform: "toml", nix: "toml", groovy: "java", gradle: "java", solidity: "javascript", sol: "javascript", scss: "css", less: "css", yml: "yaml", patch: "diff", ini: "toml", cfg: "toml", postgresql: "sql", mysql: "sql", sqlite: "sql",
};

/**
 * @param {string} name  As it stands behind the fence.
 * @returns {string|null} The language whose colours it gets.
 */
export function languageOf(name) {
  const known = ALIASES[name] ?? name;
  return Object.hasOwn(LANGUAGES, known) ? known : null;
}

/**
 * @param {string} text
 * @param {string} name  Of `languageOf`.
 * @returns {Token[]} Together they are the text.
 */
export function highlight(text, name) {
  /** @type {Token[]} */
  const tokens = [];
  let place = 0;
  const plain = (piece) => {
    if (!piece) return;
    if (tokens.at(-1)?.kind === "") tokens.at(-1).text += piece; else tokens.push({ kind: "", text: piece });
  };
  for (const found of text.matchAll(LANGUAGES[name])) {
    plain(text.slice(place, found.index));
    const [kind] = Object.entries(found.groups).find(([, value]) => value !== undefined);
    if (kind === "plain") plain(found[0]); else tokens.push({ kind, text: found[0] });
    place = found.index + found[0].length;
  }
  plain(text.slice(place));
  return tokens;
}
