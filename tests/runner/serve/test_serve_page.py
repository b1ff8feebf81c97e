"""The page at / has only its own files, and streams report the author of each token for it."""

import hashlib
import json
import re

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import ASKED

from eagle3.runner.serve.chat import Authors
from eagle3.runner.serve.markup import CHANNEL, Splitter
from eagle3.runner.serve.page import FOLDER
from eagle3.runner.serve.protocol import Delta

FILES = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript", "api.js": "text/javascript"}
FILES |= dict.fromkeys(
    ("reply.js", "follow.js", "markdown.js", "marked.esm.js", "elements.js", "dialogues.js"), "text/javascript"
)
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
    given = model.text, model.metadata, {"skip_special_tokens": False}
    authors, splitter = Authors(*given), Splitter(CHANNEL)
    stream, said, place, ends, whole = Authors(*given)._stream, [], 0, [], ""
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
