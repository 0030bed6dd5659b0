"""What the chat page makes of texts of models, in a real browser: Markdown, formulas, colours, and hostile texts."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import pytest

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_byte_tokenizer
from browser.chromium import NEEDED, find, started, texts, until
from browser.markdown_page import serving_markdown, show, time_show
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving
from unit.studio.serving import TOKEN, studio
from unit.web_libraries import NEEDS_LIBRARIES

pytestmark = NEEDED

MOST_SECONDS = 20
"""Of one hostile text, on a machine that does much else. Texts whose time grows with their square take minutes."""

ANSWER = """# Attention

The **softmax** of *scores*; `d_k` is the size, $d_k$ too. It costs $5 and $10. See
[the paper](https://arxiv.org/abs/1706.03762) or https://example.org/a_(b).

$$\\frac{QK^\\top}{\\sqrt{d_k}}$$

1. Project
   - queries
     - per head
2. Score

| Method | GiB | Note |
|:--|--:|:-:|
| a_very_long_name_of_a_method | 61.2 | x\\|y |

```python
def attention(q, k):  # scores
    return "q" @ k * 0.5
```

- [x] done
- [ ] open

![a picture](https://example.org/x.png)
"""


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The page with the libraries; every test looks at its console."""
    with serving_markdown(tmp_path_factory.mktemp("page")) as url:
        browser.get(url)
        browser.get_log("browser")
        yield browser


@pytest.fixture(autouse=True)
def quiet(browser):
    yield
    assert not browser.get_log("browser")


def query(browser, script):
    return browser.execute_script(f"const body = document.querySelector('.body'); return {script}")


@NEEDS_LIBRARIES
class TestFormats:
    def test_an_answer_has_its_structure(self, page):
        html = show(page, ANSWER)
        for piece in (
            "<h3>Attention</h3>",
            "<strong>softmax</strong> of <em>scores</em>; <code>d_k</code>",
            "It costs $5 and $10.",
            "<ol><li>Project<ul><li>queries<ul><li>per head</li></ul></li></ul></li><li>Score</li></ol>",
            '<th class="right">GiB</th><th class="center">Note</th>',
            '<td class="right">61.2</td><td class="center">x|y</td>',
        ):
            assert piece in html
        assert texts(page, ".body .code .bar span") == ["python"]
        assert query(page, "[...body.querySelectorAll('.task input')].map((one) => [one.checked, one.disabled])") == [
            [True, True],
            [False, True],
        ]
        links = query(page, "[...body.querySelectorAll('a')].map((one) => [one.href, one.rel])")
        rel = "noopener noreferrer nofollow"
        addresses = ["https://arxiv.org/abs/1706.03762", "https://example.org/a_(b)", "https://example.org/x.png"]
        assert links == [[address, rel] for address in addresses]
        assert query(page, "document.images.length") == 0

    def test_formulas_are_mathml_with_their_parts(self, page):
        show(page, ANSWER)
        space = "http://www.w3.org/1998/Math/MathML"
        assert query(page, "[...body.querySelectorAll('math')].map((one) => one.namespaceURI)") == [space] * 2
        assert query(page, "body.querySelectorAll('.formula mfrac msqrt msub').length") == 1
        assert query(page, "body.querySelector('.math msub').textContent") == "dk"

    @pytest.mark.parametrize(
        ("text", "formulas"),
        [
            (r"\(x\) and \[y\]", ["x", "y"]),
            ("$x$, $y_1$ and $$z$$", ["x", "y1", "z"]),
            ("$$\nx\n$$\n\n\\[\ny\n\\]", ["x", "y"]),
            ("> $$x$$\n\n- \\(y\\)\n  $$\n  z\n  $$", ["x", "y", "z"]),
            ("| a |\n|---|\n| $x$ |", ["x"]),
            ("由 $x$ 得，$y$。", ["x", "y"]),
            ("$5 and $10, US$3 or 20$; $ x $ and $$$", []),
            (r"\$x\$ and `$x$` and \\(x\\)", []),
            ("```\n$x$ \\(y\\)\n```", []),
            (r"$\frac{$ and $\unknown{x}$", []),
        ],
    )
    def test_which_texts_are_formulas(self, page, text, formulas):
        show(page, text)
        found = query(page, "[...body.querySelectorAll('math')].map((one) => one.textContent)")
        assert [re.sub(r"\s|[^\x20-\x7e]", "", one) for one in found] == formulas
        if not formulas:
            assert query(page, "body.textContent.match(/[x$]/) !== null")

    @pytest.mark.parametrize(
        "address", ["javascript:stolen=1", "data:text/html,x", "file:///etc/passwd", "//b.org", "/x"]
    )
    def test_other_addresses_are_no_links(self, page, address):
        html = show(page, f"[a]({address}) <{address}> ![c]({address}) [d][1]\n\n[1]: {address}")
        assert "<a" not in html and "<img" not in html

    def test_code_has_colours_that_can_be_read(self, page):
        code = """```python
@decorated
class One(Base):
    \"\"\"Words.\"\"\"
    def two(self, x: int = 3) -> None:  # why
        return print(f"{x}", True)
```

```diff
- old
+ new
```

```html
<p class="a">x &amp; y</p>
```"""
        for theme in ("light", "dark"):
            page.execute_script("choose('en', arguments[0])", theme)
            show(page, code)
            pairs = page.execute_script(READ_COLOURS)
            assert len({name for name, *_ in pairs}) >= 8
            for name, front, back in pairs:
                assert contrast(front, back) >= 4.5, (theme, name, front, back)
        page.execute_script("choose('en', 'auto')")

    def test_the_language_of_code_and_its_text(self, page):
        show(
            page, "```Python title=x\na = 1\n```\n\n```nonsense\na = 1\n```\n\n```__proto__\nx\n```\n\n    indented = 1"
        )
        assert texts(page, ".body .code .bar span") == ["Python", "nonsense", "__proto__", ""]
        assert texts(page, ".body pre") == ["a = 1", "a = 1", "x", "indented = 1"]
        assert query(
            page, "[...body.querySelectorAll('pre')].map((one) => one.querySelectorAll('span').length > 0)"
        ) == [
            True,
            False,
            False,
            False,
        ]

    def test_long_code_is_shown_without_colours(self, page):
        for code in ("x = 1\n" * 6_000, "x" * 3_000):
            show(page, f"```python\n{code.rstrip()}\n```")
            assert query(page, "body.querySelectorAll('pre span').length") == 0
            assert query(page, "body.querySelector('pre').textContent") == code.rstrip()

    def test_code_is_copied(self, page):
        show(page, "```python\nprint('<b>')\n```")
        page.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        find(page, ".code .copy").click()
        until(lambda: texts(page, ".code .copy") == ["Copied"])
        assert page.execute_script("return window.copied") == "print('<b>')"

    def test_wide_things_scroll_by_themselves_and_words_stay_whole(self, page):
        names = [f"optimizer_state_of_every_parameter_{at}" for at in range(6)]
        row = "|" + "|".join(names) + "|"
        show(page, f"{row}\n{'|---' * 6}|\n{row}\n\n$${'+'.join('abcdefgh' * 8)}$$\n\n```\n{'x' * 300}\n```")
        page.set_window_size(420, 800)
        try:
            assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            assert query(
                page,
                "$('log').scrollWidth <= $('log').clientWidth".replace("$('log')", "document.getElementById('log')"),
            )
            for css in (".table", ".formula", ".code pre"):
                wide = query(
                    page, f"((one) => [one.scrollWidth > one.clientWidth, one.tabIndex])(body.querySelector('{css}'))"
                )
                assert wide == [True, 0], css
            heights = query(page, "[...body.querySelectorAll('td')].map((one) => one.getClientRects()[0].height)")
            assert max(heights) < 50
        finally:
            page.set_window_size(1200, 800)


READ_COLOURS = """
return [...document.querySelectorAll('pre code span')].map((one) => {
  let back = "rgba(0, 0, 0, 0)";
  for (let at = one; back === "rgba(0, 0, 0, 0)"; at = at.parentElement) back = getComputedStyle(at).backgroundColor;
  return [one.className, getComputedStyle(one).color, back];
});
"""


def contrast(one: str, other: str) -> float:
    """Ratio of two colours as WCAG 2 defines it, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@NEEDS_LIBRARIES
class TestStreaming:
    @pytest.mark.parametrize("streaming", [True, False])
    def test_every_beginning_of_an_answer_can_be_shown(self, page, streaming):
        script = """
        const [text, streaming] = arguments;
        const lengths = [];
        for (let at = 0; at <= text.length; at += 1) {
          lengths.push(show(text.slice(0, at), streaming).textContent.length);
        }
        return [lengths, show(text).innerHTML];
        """
        lengths, html = page.execute_script(script, ANSWER, streaming)
        assert len(lengths) == len(ANSWER) + 1
        assert html == show(page, ANSWER)

    def test_what_was_written_stays_as_it_is(self, page):
        """No block that another one follows changes any more, so nothing above the end moves."""
        script = """
        const changes = [];
        let before = [];
        for (let at = 1; at <= arguments[0].length; at += 1) {
          const now = [...show(arguments[0].slice(0, at), true).children].map((one) => one.outerHTML);
          before.slice(0, -1).forEach((one, place) => { if (now[place] !== one) changes.push([at, one, now[place]]); });
          before = now;
        }
        return changes;
        """
        assert page.execute_script(script, ANSWER) == []

    @pytest.mark.parametrize(
        ("text", "inside"),
        [
            ("a\n\n```python\nx = 1", "pre"),
            ("a\n\n~~~\nx", "pre"),
            ("a $$x + ", ".formula code"),
            ("a\n\n$$\nx + ", ".formula code"),
            ("a\n\n\\[\n\\frac{x", ".formula code"),
            ("a \\(x", ".math code"),
        ],
    )
    def test_what_is_still_open_is_shown_as_what_it_will_be(self, page, text, inside):
        show(page, text, streaming=True)
        assert "x" in texts(page, f".body {inside}")[0]

    def test_a_mark_that_has_just_begun_is_not_shown_yet(self, page):
        for text in ("a\n\n``", "a\n\n$", "a\n\n##", "a \\"):
            show(page, text, streaming=True)
            assert texts(page, ".body") == ["a"]
            assert show(page, text) != show(page, text, streaming=True)

    def test_two_answers_grow_at_once(self, page):
        one, other = ANSWER, ANSWER.replace("Attention", "Another")
        for at in range(0, len(ANSWER), 7):
            for text in (one, other):
                show(page, text[:at], streaming=True)
        last = [show(page, text + "\n\nend", streaming=True) for text in (one, other)]
        assert last == [show(page, text + "\n\nend") for text in (one, other)]

    def test_a_long_answer_grows_quickly(self, page):
        """100 kB: a frame costs what its last block costs, not the whole answer."""
        text = "".join(ANSWER.replace("61.2", str(at)) for at in range(140))[:100_000]
        show(page, text[:-600], streaming=True)
        script = """
        const times = [];
        for (let at = arguments[0].length - 500; at < arguments[0].length; at += 10) {
          const began = performance.now();
          markdown(arguments[0].slice(0, at), true);
          times.push(performance.now() - began);
        }
        return times.sort((one, other) => one - other)[times.length >> 1];
        """
        assert page.execute_script(script, text) < 500

    def test_an_answer_comes_from_a_server(self, browser, tmp_path_factory, page):
        home = page.current_url
        tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        pieces = ["# Head\n\n", "**bold**", " and ", "$x_1$", "\n\n```python\n", "y = 1", "\n```"]
        tokenizer.add_tokens(pieces)
        model = says(tokenizer, pieces, 2048)
        try:
            with serving(
                catalogue_of({"one": (Engine(model, tokenizer, max_batch=1, max_len=2048), model)})
            ) as running:
                browser.get(running.url)
                until(lambda: find(browser, "#model").get_attribute("value") == "one")
                find(browser, "#say").send_keys("go\n")
                until(lambda: "tokens" in " ".join(texts(browser, "article.theirs .tools")))
                html = find(browser, "article.theirs .body").get_attribute("innerHTML")
                assert "<h3>Head</h3>" in html and "<strong>bold</strong>" in html and "<msub>" in html
                assert texts(browser, ".body pre") == ["y = 1"] and 'class="code-number"' in html
        finally:
            browser.get(home)


def repeat_lines(make, times):
    return "\n".join(make(at) for at in range(times))


SLOW = {
    "quotations": ">" * 10_000 + "x",
    "quotations with blanks": "> " * 10_000 + "x",
    "quotations and lists": "> - " * 5_000 + "x",
    "brackets": "[" * 10_000,
    "links in links": "[a](" * 10_000,
    "pictures": "![" * 20_000,
    "dollars": "$" * 1_000_000,
    "open formulas": "$ x" * 100_000,
    "brackets of formulas": "\\(" * 100_000,
    "lines of open formulas": "\\[\n" * 20_000,
    "formulas": "$x_1$ " * 10_000,
    "stars": "a**" * 50_000,
    "underscores": "_a " * 50_000,
    "marks of code": " ".join("`" * at for at in range(600)),
    "lists in lists": repeat_lines(lambda at: "  " * at + "- x", 500),
    "a wide table": "a|" * 50_000 + "\n" + "-|" * 50_000,
    "a table": "|a" * 90 + "|\n" + "|-" * 90 + "|\n" + ("|x" * 90 + "|\n") * 300,
    "references": repeat_lines(lambda at: f"[a{at}]: http://b.org/{at}", 4_000)
    + "\n\n"
    + repeat_lines(lambda at: f"[a{at}]", 4_000),
    "paragraphs": "a\n\n" * 100_000,
    "addresses": "http://a.b " * 20_000,
    "matrix": "$$\\begin{matrix}" + "&" * 1_400 + "\\\\" * 700 + "\\end{matrix}$$",
    "commands": "$$\\def\\a{" + "x" * 2_000 + "}" + "\\a" * 400 + "$$",
    "endless commands": "$$\\def\\a{\\b\\b}\\def\\b{\\a\\a}\\a$$",
    "roots": "$" + "\\sqrt{" * 400 + "x" + "}" * 400 + "$",
    "braces": "$$" + "{" * 1_400 + "}" * 1_400 + "$$",
    "code of Python": "```python\n" + "(" * 30_000,
    "code of JavaScript": "```js\n" + "${\n" * 9_000,
    "code of Markdown": "```markdown\n" + "[a](\n" * 5_000,
    "code of XML": "```xml\n" + "<a \n" * 7_000,
    "entities": "&#x41;" * 20_000,
}


@NEEDS_LIBRARIES
class TestHostileTexts:
    @pytest.mark.parametrize("name", SLOW)
    def test_the_page_stays_alive(self, page, name):
        seconds = time_show(page, SLOW[name])
        assert seconds < MOST_SECONDS
        assert 0 < query(page, "body.getElementsByTagName('*').length") < 120_000
        began = time.monotonic()
        show(page, SLOW[name], streaming=True)
        assert time.monotonic() - began < MOST_SECONDS

    @pytest.mark.parametrize(
        "text",
        [
            "<script>stolen = 1</script>",
            "<img src=x onerror='stolen = 1'>",
            "<svg onload='stolen = 1'></svg><iframe srcdoc='<script>parent.stolen = 1</script>'></iframe>",
            "<style>body { display: none }</style><form action='https://b.org'><input></form>",
            "[a](javascript:stolen=1) [b](JaVaScRiPt:stolen=1)",
            "[c](&#106;avascript:stolen=1) [d](java\tscript:stolen=1)",
            "[a](vbscript:x) <javascript:stolen=1> ![x](javascript:stolen=1)",
            "[a](https://b.org/'onmouseover='stolen=1) [b](https://b.org \"' onclick='stolen=1\")",
            '```"><script>stolen=1</script>\nx\n```',
            "# <b onclick=stolen=1>x</b>\n\n| <i onclick=stolen=1>x</i> |\n|---|",
            r"$\href{javascript:stolen=1}{x}$ $\url{javascript:stolen=1}$ $$\href{javascript:stolen=1}{x}$$",
            r"$\htmlData{a=b}{x}$ $\htmlId{log}{x}$ $\class{bad}{x}$ $\style{position: fixed}{x}$",
            r"$\includegraphics{https://b.org/x.png}$ $\text{<img src=x onerror=stolen=1>}$",
            r"$$\label{log} x \tag{<b>1</b>}$$ $\ref{log}$ $\eqref{log}$",
        ],
    )
    def test_nothing_runs_and_nothing_is_loaded(self, page, text):
        html = show(page, text)
        assert not re.search(r"<(script|img|svg|iframe|style|form|object|embed)\b", html)
        found = query(page, "[...body.querySelectorAll('*')].map((one) => [one.localName, one.getAttributeNames()])")
        known = {"href", "rel", "target", "class", "tabindex", "lang", "type", "style", "start"}
        for name, attributes in found:
            assert not [one for one in attributes if one.startswith(("on", "data-", "id", "src"))], (name, attributes)
            if not page.execute_script("return document.querySelector('.body math') !== null"):
                assert set(attributes) <= known
        hrefs = query(page, "[...body.querySelectorAll('[href]')].map((one) => one.protocol)")
        assert set(hrefs) <= {"https:", "http:", "mailto:"}
        page.execute_script(
            "for (const one of document.querySelectorAll('.body *')) one.dispatchEvent(new Event('mouseover'))"
        )
        assert page.execute_script("return [window.stolen ?? null, document.images.length]") == [None, 0]
        assert query(page, "document.querySelectorAll('#log').length") == 1
        assert query(page, "document.getElementById('say').getBoundingClientRect().height") > 0

    def test_formulas_reach_no_other_text(self, page):
        show(
            page,
            r"before $\raisebox{-8em}{stolen}$ $\kern-40em{stolen}$ $\rule{900em}{900em}$ $\mathllap{stolen stolen}$",
        )
        clipped = query(page, "[...body.querySelectorAll('.math')].map((one) => getComputedStyle(one).overflowX)")
        assert clipped and set(clipped) <= {"clip", "auto"}
        assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")

    def test_odd_characters(self, page):
        for text in ("a\r\nb\rc\0d", "".join(map(chr, range(1, 32))), "\u202eabc `x\u202e` \ufeff\u2028\u2029", ""):
            show(page, text)
        show(page, "a\r\nb\0")
        assert texts(page, ".body") == ["a\nb\ufffd"]
        page.execute_script("show('\\ud800 **a** \\udfff')")
        assert texts(page, ".body strong") == ["a"]


class TestWithoutLibraries:
    @pytest.fixture
    def plain(self, browser, tmp_path):
        home = browser.current_url
        with serving_markdown(tmp_path, with_libraries=False) as url:
            browser.get(url)
            yield browser
        browser.get(home)

    def test_a_text_is_shown_as_it_was_written(self, plain):
        show(plain, ANSWER)
        assert texts(plain, ".body pre") == ['def attention(q, k):  # scores\n    return "q" @ k * 0.5']
        assert texts(plain, ".body .code .bar span") == ["python"]
        shown = query(plain, "body.textContent")
        for line in ANSWER.splitlines():
            assert line.startswith("```") or line in shown
        for streaming, at in itertools.product((True, False), range(0, len(ANSWER), 5)):
            show(plain, ANSWER[:at], streaming)

    def test_hostile_texts_are_text(self, plain):
        html = show(plain, "<img src=x onerror='stolen = 1'> [a](javascript:stolen=1)")
        assert "<img" not in html and "<a" not in html
        for text in ("$" * 1_000_000, "> " * 10_000, "```\n" * 50_000, "\n" * 300_000):
            assert time_show(plain, text) < MOST_SECONDS
        assert plain.execute_script("return [window.stolen ?? null, document.images.length]") == [None, 0]


@NEEDS_LIBRARIES
def test_the_studio_serves_them_to_its_chat_page(tmp_path_factory):
    turns = [{"role": "assistant", "content": "**bold** $x_1$", "model": "one"}]
    talks = json.dumps([{"id": "1", "at": 1, "title": "t", "turns": turns}])
    profile: Path = tmp_path_factory.mktemp("profile")
    with studio(tmp_path_factory.mktemp("runs"), TOKEN) as running, started(profile) as browser:
        browser.get(f"{running.url}/?token={TOKEN}")
        browser.get(f"{running.url}/chat")
        browser.execute_script("localStorage.setItem('anabatic.talks', arguments[0])", talks)
        browser.refresh()
        until(lambda: texts(browser, "article"))
        html = find(browser, "article .body").get_attribute("innerHTML")
        assert "<strong>bold</strong>" in html and "<msub>" in html
        assert not [entry for entry in browser.get_log("browser") if "libraries" in entry["message"]]
