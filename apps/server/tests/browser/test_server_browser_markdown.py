"""Markdown, code and formulas of the chat page: what they become, also of hostile texts and while they stream."""

from __future__ import annotations

from typing import Any

import pytest

SHOWN = """
const { markdown } = await import(new URL('page/markdown.js', location.href).href);
return markdown(arguments[0]).innerHTML;
"""
STREAMED = """
const { MarkdownView, markdown } = await import(new URL('page/markdown.js', location.href).href);
const [text, size] = arguments, view = new MarkdownView();
let changed = 0, kept = null, first = null;
for (let end = size; end < text.length; end += size) {
  view.show(text.slice(0, end), false);
  first ??= view.element.firstChild;
}
const same = view.element.firstChild === first;
view.show(text, true);
return [view.element.innerHTML === markdown(text).innerHTML, same, view.element.innerHTML];
"""
"""Show a text piece by piece: whether it ends as if shown at once, and whether its first block kept its element."""


@pytest.fixture(scope="module")
def page(open_page: Any, served: Any) -> Any:
    return open_page(f"{served.url}/")


CASES = {
    "# One\n## Two ##": "<h2>One</h2><h3>Two</h3>",
    "Title\n===": "<h2>Title</h2>",
    "a *b* **c** ~~e~~ `f`": "<p>a <em>b</em> <strong>c</strong> <s>e</s> <code>f</code></p>",
    "***d*** **a *b* c**": "<p><em><strong>d</strong></em> <strong>a <em>b</em> c</strong></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "**unclosed and `open": "<p>**unclosed and `open</p>",
    "one\ntwo": "<p>one<br>two</p>",
    "- a\n- b\n  - c\n    1. d\n- e": "<ul><li>a</li><li>b<ul><li>c<ol><li>d</li></ol></li></ul></li><li>e</li></ul>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "1. a\n\n   more\n\n2. b": "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>",
    "> a\n> > b\nlazy": "<blockquote><p>a</p><blockquote><p>b<br>lazy</p></blockquote></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "\\*no\\* \\# \\[x](y)": "<p>*no* # [x](y)</p>",
    "a<br>b": "<p>a<br>b</p>",
    "``a ` b``": "<p><code>a ` b</code></p>",
    "5 $ and 6 $": "<p>5 $ and 6 $</p>",
    "costs $5 and $6": "<p>costs $5 and $6</p>",
}


@pytest.mark.parametrize("text", CASES)
def test_markdown(page: Any, text: str) -> None:
    assert page.run(SHOWN, text) == CASES[text]


def test_links_lead_to_safe_addresses_alone(page: Any) -> None:
    link = '<a href="{}" target="_blank" rel="noopener noreferrer nofollow">{}</a>'
    assert page.run(SHOWN, '[a *b*](https://x.example/(y) "t")').count("<em>b</em>") == 1
    assert (
        page.run(SHOWN, "see https://x.example/a_b_c.")
        == f"<p>see {link.format('https://x.example/a_b_c', 'https://x.example/a_b_c')}.</p>"
    )
    assert page.run(SHOWN, "<mailto:a@b.example>") == f"<p>{link.format('mailto:a@b.example', 'a@b.example')}</p>"
    hostile = (
        "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](<java\tscript:alert(1)>)", "[a](data:text/html,x)",
        "[a](vbscript:x)", "[a](file:///etc/passwd)", "<javascript:alert(1)>", "![a](https://x.example/track.png)",
        "![a](data:image/svg+xml;base64,PHN2Zz4=)", "[a](//x.example)", "[a]( javascript:alert(1))",
    )  # fmt: skip
    for text in hostile:
        shown = page.run(SHOWN, text)
        assert "<img" not in shown, text
        assert "href" not in shown or 'href="https://x.example/track.png"' in shown, text
    picture = "data:image/png;base64,iVBORw0KGgo="
    assert f'<img src="{picture}" alt="dot">' in page.run(SHOWN, f"![dot]({picture})")


def test_markup_is_text(page: Any) -> None:
    made = """
    const { markdown } = await import(new URL('page/markdown.js', location.href).href);
    const listens = (each) => [...each.attributes].some(({ name }) => name.startsWith('on'));
    const hostile = (each) => /^(script|img|details)$/i.test(each.tagName) || listens(each);
    return [...markdown(arguments[0]).querySelectorAll('*')].filter(hostile).map((each) => each.outerHTML);
    """
    for text in (
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<details open ontoggle=alert(1)>",
        "<svg/onload=x>",
    ):
        for form in (
            "{}",
            "# {}",
            "- {}",
            "> {}",
            "`{}`",
            "```html\n{}\n```",
            "|a|\n|-|\n|{}|",
            "${}$",
            "[{}](https://x.example)",
        ):
            assert page.run(made, form.format(text)) == [], (form, text)


TABLE = """| a | b |
|:--|--:|
| 1 | `x|y` |
| 2 \\| 3 |
| 4 | 5 | 6 |
after"""


def test_tables_also_broken_ones(page: Any) -> None:
    shown = page.run(SHOWN, TABLE)
    assert '<th scope="col" class="left">a</th><th scope="col" class="right">b</th>' in shown
    assert shown.count("<tr>") == 4
    assert '<td class="left">1</td><td class="right"><code>x|y</code></td>' in shown
    assert '<td class="left">2 | 3</td><td class="right"></td>' in shown
    assert '<td class="left">4</td><td class="right">5</td></tr>' in shown
    assert shown.endswith("<p>after</p>")
    for text in ("| a | b |\n|---|", "| a |\n|:-:|-|", "a | b\n--- | x", "|\n|-", "| a | b |"):
        assert "<td" not in page.run(SHOWN, text)


def test_code_is_coloured_and_copied(page: Any) -> None:
    coloured = """
    const { highlight, languageOf } = await import(new URL('page/highlight.js', location.href).href);
    return arguments[0].map(([name, text]) => {
      const tokens = highlight(text, languageOf(name));
      return [tokens.map((token) => token.text).join('') === text, tokens.map((token) => token.kind).filter(Boolean)];
    });
    """
    samples = [
        ("python", "@x\ndef f(a):\n    '''doc'''\n    return 1.5  # end"),
        ("js", "const a = `x ${y}`; // end\nnew Map(null)"),
        ("cpp", "#include <x>\nint main() { return 0x1F; /* c */ }"),
        ("java", '@Override public String f() { return "a\\"b"; }'),
        ("go", "func f() error { return nil } // x"),
        ("rust", "fn f<'a>(x: &'a str) -> u8 { println!(\"{}\", 'c'); }"),
        ("bash", 'if [ "$HOME" ]; then echo --flag; fi # x'),
        ("sql", "SELECT a FROM t WHERE b = 'x' -- end"),
        ("json", '{"a": [1, true, "x"]}'),
        ("html", '<a href="x">y</a><!-- c -->'),
        ("css", ".a { color: #fff; width: 10px } /* x */"),
        ("yaml", "a: 1\nb: [true] # x"),
        ("rb", "def f(a)\n  @b = :c # x\n  nil\nend"),
        ("php", '<?php function f($a) { return "x"; } // y'),
        ("lua", 'local a = f("x") -- y\nreturn nil'),
        ("perl", 'my $a = f("x"); # y'),
        ("r", 'f <- function(a) return(TRUE) # y "'),
        ("julia", "@time function f(a) return 1.5 end # y"),
        ("haskell", "f :: Int -> Maybe Int\nf x = case x of 1 -> Nothing -- y"),
        ("elixir", '@doc "x"\ndef f(a), do: :ok # y'),
        ("powershell", "if ($a) { Get-Item -Path 'x' } # y"),
        ("clojure", '(defn f [a] "x" :b nil) ; y'),
        ("latex", "\\begin{a} $x$ \\b{c} % y\n\\end{a}"),
        ("proto", 'message A { string b = 1; } // "x"'),
        ("graphql", 'query f($a: Int) @b { c(d: "x") } # y'),
    ]
    expected = [
        "meta keyword call string number comment",
        "keyword string comment literal",
        "meta keyword number comment",
        "meta keyword type string",
        "keyword call literal comment",
        "keyword meta string",
        "keyword string meta comment",
        "keyword string comment",
        "key number literal string",
        "keyword key string comment",
        "type key number comment",
        "key number literal comment",
        "keyword variable literal comment",
        "meta keyword variable string comment",
        "keyword call string comment literal",
        "keyword variable call string comment",
        "keyword literal comment",
        "meta keyword call number comment",
        "type keyword number literal comment",
        "meta string keyword variable comment",
        "keyword variable call meta string comment",
        "keyword string literal comment",
        "keyword type string call comment",
        "keyword type number comment",
        "keyword variable type meta string comment",
    ]
    for (is_whole, kinds), wanted, sample in zip(page.run(coloured, samples), expected, samples, strict=True):
        assert is_whole, sample
        assert set(wanted.split()) <= set(kinds), (sample, kinds)
    shown = page.run(SHOWN, "```python title\nx = 1\n```\n~~~\nplain ``` \n~~~")
    assert shown.count("<figure") == 2
    assert '<span class="language">python</span>' in shown
    assert "plain ``` " in shown


FORMULAS = {
    r"\frac{a}{b}": "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    "x_1^2": "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>",
    r"\alpha": "<mi>α</mi>",
    r"\mathbb{R}": "<mi>ℝ</mi>",
    r"\text{if } x": "<mtext>if\u00a0</mtext>",
    r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}": "<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>",
    r"\left( x \right]": '<mo fence="true" stretchy="true">(</mo>',
    r"f'(x)": "<msup><mi>f</mi><mo>′</mo></msup>",
    r"\binom{n}{k}": '<mfrac linethickness="0">',
    r"\int_0^1": '<msubsup><mo largeop="true">∫</mo><mn>0</mn><mn>1</mn></msubsup>',
    r"{a \atop b}": '<mfrac linethickness="0"><mi>a</mi><mi>b</mi></mfrac>',
    r"{a \brack b}": '<mo>[</mo><mfrac linethickness="0">',
    r"\textcolor{red}{x}": '<mstyle mathcolor="red"><mi>x</mi></mstyle>',
    r"{\color{#0a0} x + y}": '<mstyle mathcolor="#0a0"><mi>x</mi><mo>+</mo><mi>y</mi></mstyle>',
    r"\phantom{x}": "<mphantom><mi>x</mi></mphantom>",
    r"\cancel{x}": '<mrow class="cancelled"><mi>x</mi></mrow>',
    r"\mathrel{R}": "<mi>R</mi>",
    r"a\hspace{2em}b": '<mspace width="2em"></mspace>',
    r"a\mkern 9mu b": '<mspace width="0.5em"></mspace>',
    r"\ket{\psi}": '<mo fence="true" stretchy="true">|</mo><mi>ψ</mi><mo fence="true" stretchy="true">⟩</mo>',
    r"\xRightarrow{f}": '<mo stretchy="true" minsize="2em">⇒</mo>',
    r"\overleftrightarrow{AB}": "<mo>↔</mo>",
    r"a \nleq b": "<mo>≰</mo>",
    r"\overline{x}": '<mover accent="true"><mi>x</mi><mo>¯</mo></mover>',
}


@pytest.mark.parametrize("source", FORMULAS)
def test_formulas(page: Any, source: str) -> None:
    shown = page.run(SHOWN, f"It is ${source}$.")
    assert FORMULAS[source] in shown.replace("&nbsp;", "\u00a0"), shown


def test_limits_of_sums_stand_above_and_below_where_a_formula_stands_alone(page: Any) -> None:
    for text in (r"$$\sum_{i=1}^n i$$", "$$\n\\sum_{i=1}^n i\n$$", r"\[\sum_{i=1}^n i\]"):
        shown = page.run(SHOWN, text)
        assert "<munderover>" in shown
        assert 'display="block"' in shown
    assert "<msubsup>" in page.run(SHOWN, r"Inline \(\sum_{i=1}^n i\).")
    aligned = page.run(SHOWN, "\\begin{align}\na &= b \\\\\n&= c\n\\end{align}")
    assert aligned.count("<mtr>") == 2


def test_what_is_no_known_formula_is_shown_as_its_source(page: Any) -> None:
    for source in (
        r"\unknown{x}",
        r"\frac{a",
        "{" * 100,
        r"a}b",
        "x_1_2",
        r"\left( x",
        r"\begin{pmatrix} a",
        "a & b",
        r"\def\x{y}",
        r"\textcolor{url(x)}{y}",
        r"\hspace{9999em}",
    ):
        shown = page.run(SHOWN, f"$${source}$$")
        assert "<math" not in shown, source
        assert "formula" in shown, source


LONG = """# Title

Some **bold text** with `code`, and a [link](https://x.example/).

- one
- two
  1. nested
  2. more

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):
    return "text"  # comment
```

$$\\frac{1}{2}$$

1. last
2. list

Setext
------
> quote
"""


@pytest.mark.parametrize("size", [1, 3, 17])
def test_streaming_ends_as_if_shown_at_once_and_keeps_what_stands(page: Any, size: int) -> None:
    is_same, kept, shown = page.run(STREAMED, LONG, size)
    assert is_same, shown
    assert kept or size == 1  # a lone "#" is a title already


def test_marks_do_not_flash_up_while_text_streams(page: Any) -> None:
    partial = """
    const { MarkdownView } = await import(new URL('page/markdown.js', location.href).href);
    const view = new MarkdownView();
    view.show(arguments[0], false);
    return view.element.innerHTML;
    """
    assert page.run(partial, "a **bo") == "<p>a <strong>bo</strong></p>"
    assert page.run(partial, "a `co") == "<p>a <code>co</code></p>"
    assert page.run(partial, "a **") == "<p>a</p>"
    assert page.run(partial, "```python\nx = **").endswith("</code></pre></figure>")


@pytest.mark.parametrize(
    "unit",
    [
        "word ", "*a ", "**a_b ", "`", "` `` ", "[", "[a](", "![", "$", "$$ ", "\\(", "<", "http://a ", "> ", "- ", "|",
        "| a ",
        "a|b\n-|-\n", "~~", "```\n", "\\", "(", "1. a\n", "    ", "&amp;", "#", "_a_", "\\begin{align}\n",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_shown_in_time(page: Any, unit: str) -> None:
    script = """
    const { markdown } = await import(new URL('page/markdown.js', location.href).href);
    return markdown(arguments[0].repeat(arguments[1])).textContent.length;
    """
    # The driver gives up after its own time, far above what is in proportion. Nothing behind the bound is lost.
    assert page.run(script, unit, 1_000_000 // len(unit)) >= 500_000
    lines = f"{unit}\n"
    assert page.run(script, lines, 50_000 // len(lines)) >= 0
