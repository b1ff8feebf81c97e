"""The page at / shows the author of each token in a stream, has only its own files, and works in a real browser."""

import hashlib
import json
import re
import tomllib

import httpx
import pytest
from browser import ENTER, ESCAPE, SHIFT, TAB
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from served import ASKED, served

from eagle3.runner.serve.chat import Authors
from eagle3.runner.serve.engine import Delta
from eagle3.runner.serve.markup import CHANNEL, Splitter
from eagle3.runner.serve.page import FOLDER

FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript", "api.js": "text/javascript"}
FILES |= dict.fromkeys(("reply.js", "follow.js", "markdown.js", "marked.esm.js"), "text/javascript")
FILES |= {"marked.LICENSE.txt": "text/plain"}
MARKED = (
    "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"  # lib/marked.esm.js of the npm package 18.2.1
)


@pytest.fixture(scope="module")
def page(server):
    return server.url.removesuffix("v1")


def streamed(server, **more) -> list[dict]:
    asked = {"messages": ASKED, "stream": True, "return_speculation": True, **more}
    text = server.post("/chat/completions", asked).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_stream_reports_the_author_of_each_token(server, model):
    model.forget()
    pieces = list(model.stream(ASKED, max_new_tokens=40))
    model.forget()
    choices = [chunk["choices"][0] for chunk in streamed(server, max_tokens=40)]
    told = [choice["speculation"] for choice in choices if "speculation" in choice]
    assert [(each["proposed"], each["accepted"]) for each in told] == [
        (piece.proposed, piece.accepted) for piece in pieces
    ]
    assert sum(each["accepted"] for each in told) > 10 and (told[0]["proposed"], told[1]["proposed"]) == (0, 3)
    for choice in choices:
        tokens = choice.get("speculation", {}).get("content", [])
        assert "".join(token["text"] for token in tokens) == choice["delta"].get("content", "")
    for each, piece in zip(told, pieces, strict=True):
        said = [token for token in piece.token_ids if token not in model.metadata.eos_ids]
        drafted = [number < piece.accepted for number in range(len(said))]
        assert [token["drafted"] for token in each.get("content", [])] == drafted


def test_authors_are_reported_only_on_request(server):
    told = [choice for chunk in streamed(server, return_speculation=False, max_tokens=9) for choice in chunk["choices"]]
    assert told and not any("speculation" in choice for choice in told)
    answer = server.post("/chat/completions", {"messages": ASKED, "return_speculation": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_speculation"
    both = [choice for chunk in streamed(server, max_tokens=9, n=2) for choice in chunk["choices"]]
    assert {choice["index"] for choice in both if "speculation" in choice} == {0, 1}


def test_the_rounds_of_a_stream_add_up_to_its_statistics(model):
    model.forget()
    with model.stream(ASKED, max_new_tokens=60, temperature=0.8, seed=4) as stream:
        pieces = list(stream)
    stats = stream.result.stats
    assert sum(piece.proposed for piece in pieces) == stats.num_draft_tokens > 0
    assert sum(piece.accepted for piece in pieces) == stats.num_accepted_tokens > 0
    assert sum(piece.proposed > 0 for piece in pieces) == stats.num_drafts
    with model.stream(ASKED, max_new_tokens=30) as stream:  # the budget ends within a round
        pieces = list(stream)
    assert sum(piece.accepted for piece in pieces) == stream.result.stats.num_accepted_tokens
    assert pieces[-1].accepted >= len(pieces[-1].token_ids)


@settings(max_examples=30, deadline=None)
@given(
    text=st.text(st.sampled_from("ab é€😀\n<|"), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    accepted=st.integers(0, 3),
)
def test_every_character_has_the_author_of_its_last_token(model, text, sizes, accepted):
    """The text is cut into tokens and rounds anywhere, with reasoning separated."""
    ids = model.text.tokenizer.encode("<|channel>thought\n" + text + "<channel|>" + text, add_special_tokens=False).ids
    authors, splitter = Authors(model, {"skip_special_tokens": False}), Splitter(CHANNEL)
    stream, said, place, ends, whole = Authors(model, {"skip_special_tokens": False})._stream, [], 0, [], ""
    while place < len(ids):
        size = sizes[len(said) % len(sizes)]
        fresh = ids[place : place + size]
        place += size
        by_draft = min(accepted, len(fresh))
        text_of_round = ""
        for number, token in enumerate(fresh):
            text_of_round += stream.push([token])
            ends.append((len(whole + text_of_round), number < by_draft))
        whole += text_of_round
        said.append((splitter.push(text_of_round), Delta(text_of_round, fresh, [], 3, by_draft)))
    whole += (rest := stream.finish())
    said.append((splitter.push(rest) + splitter.finish(), None))
    for parts, delta in said:
        told = authors.told(parts, delta)
        for part in parts:
            tokens = [token for name in ("content", "reasoning_content") for token in told.get(name, [])]
            assert whole[part.start : part.start + len(part.text)] == part.text
        assert sum(len(token["text"]) for token in tokens) == sum(len(part.text) for part in parts) if parts else True
        drafted = [token["drafted"] for token in _by_character(told)]
        places = [place for part in _in_order(parts) for place in range(part.start, part.start + len(part.text))]
        expected = [next((by for end, by in ends if end > place), ends[-1][1]) for place in places]
        assert drafted == expected


def _by_character(told: dict) -> list[dict]:
    return [token for name in ("reasoning_content", "content") for token in told.get(name, []) for _ in token["text"]]


def _in_order(parts) -> list:
    return sorted(parts, key=lambda part: part.kind, reverse=True)  # reasoning first


def test_the_files_of_the_page_are_served(page):
    for name, kind in FILES.items():
        answer = httpx.get(page + name)
        assert answer.status_code == 200 and answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert httpx.head(page + name).headers["Content-Length"] == str(len(answer.content))
    assert {file.name for file in FOLDER.iterdir()} == {name or "index.html" for name in FILES}


def test_the_page_refers_to_nothing_but_its_own_files():
    texts = {file.name: file.read_text() for file in FOLDER.iterdir() if file.suffix != ".txt"}
    own = {name: text for name, text in texts.items() if name != "marked.esm.js"}
    for name, text in own.items():
        found = {
            url for url in re.findall(r"\w+://[^\s'\"]+", text) if not url.startswith("http://www.w3.org/2000/svg")
        }
        assert not found, name
    linked = set(re.findall(r'(?:href|src)="([\w./-]+)"', texts["index.html"]))
    linked |= {name for text in own.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert linked == texts.keys() - {"index.html"}
    named = set(re.findall(r'at\("([\w-]+)"\)', texts["page.js"]))
    assert named and named <= set(re.findall(r'id="([\w-]+)"', texts["index.html"]))
    assert not any("innerHTML" in text or "eval(" in text for text in texts.values())


def test_the_markdown_parser_is_the_unchanged_package_with_its_licence():
    file, licence = FOLDER / "marked.esm.js", (FOLDER / "marked.LICENSE.txt").read_text()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == MARKED
    version = re.search(r"marked v([\d.]+)", file.read_text())[1]
    assert f"version {version}, unchanged" in licence and "Permission is hereby granted, free of charge" in licence


def test_an_installed_package_contains_the_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["eagle3.runner.serve"] == ["static/*"]


def test_the_page_needs_no_key_and_shows_nothing_without_one(model, artifact):
    with served([model], artifact, key="secret") as server:
        assert httpx.get(server.url.removesuffix("v1")).status_code == 200
        assert httpx.get(server.url + "/models").status_code == 401


SENT = "return document.getElementById('stop').hidden && document.querySelectorAll('.answer').length == arguments[0]"


def test_a_dialogue_in_a_browser_shows_answers_and_authors(chromium, server, page, model):
    model.forget()
    said = model.generate(ASKED, max_new_tokens=30)
    chromium.open(page)
    chromium.until("return document.getElementById('model').dataset.id == 'tiny'")
    chromium.run("document.getElementById('longest').value = 30")
    chromium.write(ASKED[0]["content"])  # the text field has the focus
    chromium.press(ENTER)
    chromium.until(SENT, 1)
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
    chromium.until(SENT, 2)
    assert chromium.run("return document.querySelectorAll('.answer .words')[1].textContent") == expected
    chromium.click("#fresh")
    assert chromium.run("return document.getElementById('turns').childElementCount") == 0
    assert chromium.text("#acceptance") == "–"
    assert chromium.log() == []


def test_escape_ends_an_answer_and_frees_the_model(chromium, server, page, held):
    chromium.open(page)
    chromium.until("return document.getElementById('model').dataset.id == 'tiny'")
    held.clear()
    chromium.write(ASKED[0]["content"])
    chromium.press(ENTER)
    chromium.until("return document.querySelectorAll('.words .token').length > 0")
    chromium.press(ESCAPE)
    chromium.until(SENT, 1)
    held.set()
    assert chromium.text(".answer .words") and server.engine.running in (0, 1)
    chromium.until("return document.activeElement.id == 'words'")
    assert server.post("/completions", {"prompt": "x", "max_tokens": 4}).status_code == 200


def test_html_written_by_a_model_is_shown_and_not_run(chromium, page):
    chromium.open(page)
    text = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    told = {"choices": [{"delta": {"content": text}, "speculation": {
        "proposed": 1, "accepted": 0, "content": [{"text": text, "drafted": False}]}}]}  # fmt: skip
    chromium.run(
        """window.fetch = async () => new Response(`data: ${arguments[0]}\\n\\ndata: [DONE]\\n\\n`)""", json.dumps(told)
    )
    chromium.write("x")
    chromium.press(ENTER)
    chromium.until(SENT, 1)
    assert chromium.text(".answer .words") == text and chromium.run("return window.hit === undefined")


def test_the_page_shows_a_refusal_and_restores_the_question(chromium, page):
    chromium.open(page)
    chromium.until("return document.getElementById('model').dataset.id == 'tiny'")
    question = "word " * 1500
    chromium.run("document.getElementById('words').value = arguments[0]", question)
    chromium.press(ENTER)
    chromium.until("return !document.getElementById('problem').hidden")
    assert "context length is 1024" in chromium.text("#problem")
    assert chromium.run("return document.getElementById('words').value") == question.strip()
    assert chromium.run("return document.getElementById('turns').childElementCount") == 0


def test_the_page_asks_for_the_servers_key(chromium, model, artifact):
    with served([model], artifact, key="secret") as server:
        chromium.open(server.url.removesuffix("v1"))
        chromium.until("return document.getElementById('ask-key').open")
        chromium.press(ESCAPE)
        chromium.until("return document.getElementById('problem').textContent.includes('asks for a key')")
        chromium.write("hello")
        chromium.press(ENTER)
        chromium.until("return document.getElementById('ask-key').open")
        chromium.write("secret")
        chromium.press(ENTER)
        chromium.until("return document.getElementById('model').dataset.id == 'tiny'")
        assert chromium.run("return document.getElementById('words').value") == "hello"
        chromium.run("document.getElementById('longest').value = 5")
        chromium.press(ENTER)
        chromium.until(SENT, 1)
        assert chromium.text(".answer .words")


def test_the_page_has_light_and_dark_modes_and_keyboard_use(chromium, page):
    chromium.open(page)
    back = "return getComputedStyle(document.body).backgroundColor"
    first = chromium.run(back)
    chromium.click("#theme")
    assert chromium.run(back) != first
    chromium.click("#theme")
    assert chromium.run(back) == first
    reached = []
    chromium.click("h1")
    for _ in range(6):
        chromium.press(TAB)
        reached.append(chromium.run("return document.activeElement.id || document.activeElement.tagName"))
    assert [each for each in reached if each != "BODY"][:5] == ["fresh", "theme", "words", "send", "choose"]
    assert chromium.run("return document.documentElement.scrollWidth <= innerWidth")
