"""In a browser, on a desktop and on a phone, the page follows answers, shows Markdown with the author of each token,
and reports errors. The model is the shipped one; if a test needs another text, ``structured_outputs`` forces it."""

import re
import subprocess
import sys
import threading

import pytest
from browser import ENTER, ESCAPE, SHIFT
from served import ASKED, served

SIZES = {"desktop": (1280, 800, False), "phone": (390, 844, True)}
READY = "return document.getElementById('model').dataset.id"
ENDED = (
    f"{READY} && document.getElementById('stop').hidden && document.querySelectorAll('.answer').length == arguments[0]"
)
LEFT = "const page = document.scrollingElement; return page.scrollHeight - page.clientHeight - page.scrollTop"
TOP = "return document.scrollingElement.scrollTop"
TOLD = "return [...document.querySelectorAll('.figures')].at(-1).textContent"
PROBLEM = "return !document.getElementById('problem').hidden && document.getElementById('reason').textContent"
# Returns true if the whole last element is between the header and the composer.
IN_SIGHT = """
    const box = [...document.querySelectorAll(arguments[0])].at(-1).getBoundingClientRect();
    return box.bottom <= document.getElementById('composer').getBoundingClientRect().top + 1
        && box.top >= document.querySelector('header').getBoundingClientRect().bottom - 1"""
LONG = "".join(f"x{number} = {number}\n" for number in range(40))


@pytest.fixture
def sent(chromium):
    """A function that opens the page of a server in a given size, sends questions, and waits for the end of each
    answer."""

    def send(server, *questions, size="desktop", ended=True):
        if chromium.run("return location.href") == "about:blank" or not chromium.run(READY):
            chromium.size(*SIZES[size])
            chromium.open(server.url.removesuffix("v1"))
            chromium.until(READY)
        for question in questions:
            before = chromium.run("return document.querySelectorAll('.answer').length")
            chromium.run(
                "const words = document.getElementById('words'); words.value = arguments[0]; words.focus()", question
            )
            chromium.press(ENTER)
            if ended:
                chromium.until(ENDED, before + 1)
        return chromium

    return send


def saying(text: str) -> dict:
    return {"structured_outputs": {"choice": [text]}}


def test_a_dialogue_shows_answers_and_authors(chromium, server, model):
    model.forget()
    said = model.generate(ASKED, max_new_tokens=30)
    chromium.open(server.url.removesuffix("v1"))
    chromium.until(READY)
    chromium.run("document.getElementById('longest').value = 30")
    chromium.write(ASKED[0]["content"])  # the text field has the focus
    chromium.press(ENTER)
    chromium.until(ENDED, 1)
    assert chromium.text(".answer .words") == said.text
    drafted = chromium.run("return [...document.querySelectorAll('.words .drafted')].map(each => each.textContent)")
    pieces = list(model.stream(ASKED, max_new_tokens=30))
    assert len(drafted) == sum(min(piece.accepted, len(piece.token_ids)) for piece in pieces) > 9
    length = f"{said.stats.mean_acceptance_length:.2f}"
    assert chromium.text("#acceptance") == length and f"acceptance length {length}" in chromium.text("#status")
    assert chromium.run("return document.querySelectorAll('.rounds i').length") == said.stats.num_drafts + 1
    accepted = chromium.run("return document.querySelectorAll('.rounds b.accepted').length")
    assert accepted == said.stats.num_accepted_tokens
    history = [*ASKED, {"role": "assistant", "content": said.text}, {"role": "user", "content": "And\nclose it."}]
    model.forget()
    expected = model.generate(history, max_new_tokens=30).text
    chromium.write("And")
    chromium._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": [
        {"type": "keyDown", "value": SHIFT}, {"type": "keyDown", "value": ENTER}, {"type": "keyUp", "value": ENTER},
        {"type": "keyUp", "value": SHIFT}]}])  # fmt: skip
    chromium.write("close it.")
    chromium.press(ENTER)
    chromium.until(ENDED, 2)
    assert chromium.run("return document.querySelectorAll('.answer .words')[1].textContent") == expected
    chromium.click("#fresh")
    assert chromium.run("return document.getElementById('turns').childElementCount") == 0
    assert chromium.text("#acceptance") == "–"
    assert chromium.log() == []


@pytest.mark.parametrize("size", SIZES)
def test_the_page_follows_each_answer_to_its_end(sent, model, artifact, held, size):
    with served([model], artifact, **saying(LONG)) as server:
        page = sent(server, "one", size=size)
        assert page.run(LEFT) <= 2 and page.run(IN_SIGHT, ".figures")
        sent(server, "two", ended=False)
        page.until("return document.querySelectorAll('.answer')[1]?.querySelectorAll('.token').length > 20")
        held.clear()
        page.until("return document.querySelectorAll('.answer').length == 2")
        assert page.run(LEFT) <= 2 and page.run(IN_SIGHT, ".words .token")
        held.set()
        page.until(ENDED, 2)
        assert page.run(LEFT) <= 2 and page.run(IN_SIGHT, ".figures")


def test_the_page_does_not_scroll_a_reader_who_scrolled_up(sent, model, artifact, held):
    with served([model], artifact, **saying(LONG)) as server:
        page = sent(server, "one")
        sent(server, "two", ended=False)
        page.until("return document.querySelectorAll('.answer')[1]?.querySelectorAll('.token').length > 20")
        held.clear()
        page.run("scrollBy(0, -15)")  # as little as the first move of a finger
        place = page.run(TOP)
        held.set()
        page.until(ENDED, 2)
        assert page.run(TOP) == place and page.run(LEFT) > 40
        page.run("scrollTo(0, 0)")  # the page follows again after a question sent from further up
        sent(server, "three")
        assert page.run(LEFT) <= 2 and page.run(IN_SIGHT, ".figures")


def test_a_full_context_offers_a_new_dialogue(sent, model, artifact):
    with served([model], artifact, ignore_eos=True) as server:
        page = sent(server, "word " * 800)
        assert page.run(PROBLEM) == "The context is full: it has 1024 tokens."
        assert "it ends where the context is full" in page.run(TOLD)
        sent(server, "two", ended=False)
        page.until("return document.getElementById('reason').textContent.includes('maximum context length')")
        assert page.run("return document.getElementById('words').value") == "two"
        page.click("#anew")
        assert page.run(PROBLEM) is False and page.run("return document.querySelectorAll('#turns > *').length") == 0
        page.run("document.getElementById('longest').value = 30")
        sent(server, page.run("return document.getElementById('words').value"))
        assert page.run(TOLD).endswith("it ends at the limit of 30 tokens") and page.run(PROBLEM) is False


def test_a_question_too_long_for_any_dialogue_is_refused_and_restored(sent, server):
    question = "word " * 1500
    page = sent(server, question, ended=False)
    page.until(PROBLEM)
    assert "context length is 1024" in page.text("#problem") and page.run(
        "return document.getElementById('anew').hidden"
    )
    assert page.run("return document.getElementById('words').value") == question.strip()
    assert page.run("return document.getElementById('turns').childElementCount") == 0


def test_the_page_asks_for_the_servers_key_and_reports_a_wrong_one(sent, chromium, model, artifact):
    with served([model], artifact, key="secret") as server:
        chromium.open(server.url.removesuffix("v1"))
        wrong = "return document.getElementById('ask-key').open && !document.getElementById('key-wrong').hidden"
        chromium.until("return document.getElementById('ask-key').open")
        chromium.press(ESCAPE)
        chromium.until("return document.getElementById('problem').textContent.includes('asks for a key')")
        chromium.write("hello")
        chromium.press(ENTER)
        chromium.until("return document.getElementById('ask-key').open")
        assert not chromium.run(wrong)
        for key in ("public", "gehëim"):
            chromium.run("document.getElementById('key').value = arguments[0]", key)
            chromium.press(ENTER)
            chromium.until(wrong)
        chromium.write("secret")
        chromium.press(ENTER)
        chromium.until(READY)
        assert chromium.run(PROBLEM) is False
        assert chromium.run("return document.getElementById('words').value") == "hello"


def test_the_page_reports_that_a_killed_server_has_gone(sent, artifact):
    command = [sys.executable, "-c", "from eagle3.runner.serve.cli import main; main()", artifact, "--port", "0"]
    process = subprocess.Popen([*command, "--default", "ignore_eos=true"], stderr=subprocess.PIPE, text=True)
    try:
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+/v1", line)))
        server = type("Running", (), {"url": url})
        page = sent(server, "one", ended=False)
        page.until("return document.querySelectorAll('.words .token').length > 5")
        process.kill()
        process.wait()
        page.until(PROBLEM)
        assert "broke off" in page.run(PROBLEM) and page.run(TOLD).endswith("it broke off")
        words = page.text(".words")
        sent(server, "two", ended=False)
        page.until("return document.getElementById('reason').textContent.startsWith('No answer from 127.0.0.1')")
        assert page.run("return document.getElementById('words').value") == "two" and page.text(".words") == words
        page.click(".retry")  # the earlier answer stays if no new one arrives
        page.until("return document.getElementById('stop').hidden")
        assert page.text(".words") == words and page.run(PROBLEM).startswith("No answer from")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_page_shows_that_a_request_waits_for_another(sent, server, held):
    held.clear()
    other = threading.Thread(target=lambda: server.post("/chat/completions", {"messages": ASKED, "max_tokens": 40}))
    other.start()
    page = sent(server)
    page.run("document.getElementById('longest').value = 5")
    sent(server, "hello", ended=False)
    page.until(
        f"const told = {TOLD.removeprefix('return ')}; return told.startsWith('Waiting: the model is busy with')"
    )
    assert page.text("#status") == "Waiting: the model is busy with another request"
    held.set()
    other.join()
    page.until(ENDED, 1)
    assert "tokens in" in page.run(TOLD)


def test_escape_ends_an_answer_frees_the_model_and_is_no_length_limit(sent, model, artifact, held):
    with served([model], artifact, ignore_eos=True) as server:
        page = sent(server, "one", ended=False)
        page.until("return document.querySelectorAll('.words .token').length > 5")
        held.clear()
        page.press(ESCAPE)
        page.until(ENDED, 1)
        held.set()
        assert page.run(TOLD).endswith("you stopped it")
        page.until("return document.activeElement.id == 'words'")
        assert server.post("/completions", {"prompt": "x", "max_tokens": 4}).status_code == 200


def test_an_answer_can_be_copied_and_asked_for_again(sent, server, model):
    page = sent(server, *(each["content"] for each in ASKED))
    text = page.text(".words")
    model.forget()
    assert text == model.generate(ASKED).text
    page.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.click(".copy")
    page.until("return document.querySelector('.copy').textContent == 'Copied'")
    assert page.run("return navigator.clipboard.readText()") == text
    page.run("""window.board = navigator.clipboard; board.writeText('other');
        Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})""")
    page.click(".copy")  # without the clipboard, as on unencrypted pages
    page.until("return window.board.readText().then((text) => text == arguments[0])", text)
    page.run("document.querySelector('.answer').dataset.old = 1")
    page.click(".retry")
    page.until(f"return !document.querySelector('[data-old]') && (() => {{ {ENDED} }})()", 1)
    assert page.text(".words") == text and page.run("return document.querySelectorAll('.asked').length") == 1
    sent(server, "And close it.")
    shown = "return [...document.querySelectorAll('.retry')].map((each) => getComputedStyle(each).display != 'none')"
    assert page.run(shown) == [False, True]


MARKDOWN = """# Title one

Some **bold two**, *slanted three*, `code four`, ~~gone five~~ &amp; [link six](https://example.org/a "seven") end\\*.

```python
def eight(nine):
    return 'ten' # eleven
```

| twelve | thirteen\\|bar |
| --- | :-: |
| `fourteen` | fifteen **sixteen** |

1. 1 seventeen
2. eighteen
   - nineteen
     twenty

     more twentyone
   - [x] twentytwo

> quoted twentythree
> > deeper twentyfour
lazy twentyfive

    indented twentysix

twentyseven line  
break twentyeight <b>twentynine</b> <https://example.org/thirty>

Under thirtyone
---
![picture thirtytwo](https://example.org/picture.png)
"""  # noqa: W291
# Renders a text as it arrives, in pieces of `size` characters. The draft wrote every other piece.
RENDER = """
    const [text, size, whole] = arguments;
    return import("./markdown.js").then(({ Markdown }) => {
        const root = document.createElement("div");
        const markdown = new Markdown(root);
        const ends = [], drafted = [];
        for (let at = 0; at < text.length; at += size) {
            ends.push(Math.min(text.length, at + size));
            drafted.push(ends.length % 2 == 0);
            if (!whole) markdown.show(text.slice(0, ends.at(-1)), ends, drafted);
        }
        if (whole) markdown.show(text, ends, drafted);
        const spans = [...root.querySelectorAll(".token")];
        const tokens = spans.map((each) => [each.textContent, each.classList.contains("drafted")]);
        return [root.innerHTML, tokens];
    });"""


def test_every_character_of_rendered_markdown_keeps_its_author(sent, server, size=3):
    page = sent(server)
    html, tokens = page.run(RENDER, MARKDOWN, size, False)
    assert html == page.run(RENDER, MARKDOWN, size, True)[0]  # whatever the pieces were
    characters = [(each, drafted) for text, drafted in tokens for each in text]
    shown = "".join(each for each, _ in characters)
    words = re.findall(r"[a-z]{3,}", re.sub(r"\(https.*?\)|```python|&amp;|-->", "", MARKDOWN.lower()))
    for word in dict.fromkeys(words):
        place, source = shown.lower().find(word), MARKDOWN.lower().find(word)
        if shown.lower().count(word) != 1 or MARKDOWN.lower().count(word) != 1:
            continue
        authors = [drafted for _, drafted in characters[place : place + len(word)]]
        assert authors == [at // size % 2 == 1 for at in range(source, source + len(word))], word
    assert sum(shown.lower().count(word) == 1 and MARKDOWN.lower().count(word) == 1 for word in set(words)) > 30
    assert {"title", "eight", "thirteen", "sixteen", "twentyone", "twentyfive", "thirtytwo"} <= set(words)


def test_markdown_runs_nothing_and_loads_nothing(sent, model, artifact):
    text = (
        "**x** <img src=x onerror='window.hit=1'> ![a](https://example.org/a.png) ![b](javascript:window.hit=1)\n\n"
        "[c](javascript:window.hit=1) [d](JaVaScRiPt&colon;window.hit=1) [e](data:text/html,f) [f](/v1/models)\n\n"
        "<script>window.hit=1</script>\n\n<iframe src='https://example.org'></iframe>\n\n[g](https://example.org/g)\n"
    )
    with served([model], artifact, **saying(text)) as server:
        page = sent(server)
        page.log()
        sent(server, "x")
        assert page.run("return document.querySelector('.words').classList.contains('markdown')")
        made = page.run("return [...new Set([...document.querySelectorAll('.words *')].map((each) => each.localName))]")
        assert set(made) <= {"p", "span", "a", "strong"}
        links = page.run("return [...document.querySelectorAll('.words a')].map((each) => [each.href, each.rel])")
        assert links == [[f"https://example.org/{name}", "noopener noreferrer"] for name in ("a.png", "g")]
        assert "<script>window.hit=1</script>" in page.text(".words") and page.run("return window.hit === undefined")
        assert page.log() == []


@pytest.mark.whole
def test_a_reload_keeps_the_dialogue(sent, model, artifact, held):
    with served([model], artifact, **saying(MARKDOWN)) as server:
        page = sent(server, "one", "two")
        page.run("document.getElementById('system').value = 'Be brief.'")
        drawn = "return [document.getElementById('turns').innerHTML, document.getElementById('acceptance').textContent]"
        before = page.run(drawn)
        page.open(server.url.removesuffix("v1"))
        page.until(ENDED, 2)
        page.until("return document.querySelectorAll('.words h2').length == 2")
        assert page.run(drawn) == before and page.run("return document.getElementById('system').value") == "Be brief."
        assert page.run("return document.getElementById('welcome').hidden")
        sent(server, "three", ended=False)
        page.until("return document.querySelectorAll('.answer')[2]?.querySelectorAll('.token').length > 9")
        held.clear()
        page.open(server.url.removesuffix("v1"))
        page.until(ENDED, 3)
        held.set()
        assert page.run(TOLD).endswith("you left before its end")
        page.click("#fresh")
        page.open(server.url.removesuffix("v1"))
        page.until(READY)
        assert page.run("return document.querySelectorAll('.answer').length") == 0
