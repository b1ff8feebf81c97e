"""In a browser, the page draws answers from chunks that a test makes. Dialogues are kept there, edited and deleted."""

import pytest
from browser import ENTER

READY = "return document.getElementById('model').dataset.id"
ENDED = "return document.getElementById('stop').hidden && document.querySelectorAll('.answer').length == arguments[0]"
# Draws an answer, one token a chunk, of [field, text] pairs. Returns the milliseconds.
TAKE = """
    const [tokens, ...given] = arguments;
    return import("./reply.js").then(async ({ Reply }) => {
        const root = document.createElement("li");
        document.getElementById("turns").append(root);
        const reply = new Reply(root, ...given);
        const begun = performance.now();
        for (const [number, [field, text]] of tokens.entries()) {
            const speculation = { proposed: 1, accepted: 0, [field]: [{ text, drafted: number % 2 == 0 }] };
            reply.take({ choices: [{ delta: {}, speculation }] });
            if (number % 100 == 99) await new Promise(requestAnimationFrame);
        }
        reply.end("stop");
        return root.offsetHeight && performance.now() - begun;
    });"""
PROGRAM = "## settings\nimport os\n\n## the size of a [file](https://example.org)\ndef size(path):\n    return 4\n"
# For each text, whether it is drawn as Markdown; None if it is drawn as earlier answers were.
KINDS = {PROGRAM: False, f"```python\n{PROGRAM}```\n": True, "print(**a,**b)\nx = {\n": False, "# Title\n\n- a\n": None}
KINDS |= {"## four\nx = 4\n": False, "**Four**\n\nx = 4\n": True}
KINDS["Use **with**:\n\n- it closes;\n- it waits {\n\n\\frac{a}{b};\nf(x) = g(x)\n"] = True


@pytest.fixture
def page(chromium, server):
    chromium.open(server.url.removesuffix("v1"))
    chromium.until(READY)
    return chromium


def take(page, *tokens: str, field: str = "content", given=()) -> float:
    return page.run(TAKE, [[field, token] for token in tokens], *given)


def ask(page, question: str, answers: int) -> None:
    page.run("const words = document.getElementById('words'); words.value = arguments[0]; words.focus()", question)
    page.press(ENTER)
    page.until(ENDED, answers)


def test_a_program_is_markdown_only_in_a_fence(page):
    shown = "return [...document.querySelectorAll('.words')].at(-1).classList.contains('markdown')"
    for text, is_markdown in KINDS.items():  # the earlier answers were of the other kind
        take(page, *text.splitlines(keepends=True), given=(None, not is_markdown))
        assert page.run(shown) == (is_markdown is not False), text


def test_drawing_takes_a_time_linear_in_the_line_ends(page):
    assert take(page, "a", *["\n"] * 3000) < 10_000  # minutes, when each chunk searched all of the text again
    assert page.run("return [...document.querySelectorAll('.words')].at(-1).textContent") == "a" + "\n" * 3000


def test_task_lists_have_check_boxes_that_nobody_can_change(page):
    take(page, "**x**\n\n- [x] one\n- [ ] two <input>\n\n1. [X] three\n\n2. four\n")
    boxes = "return [...document.querySelectorAll('.words input')].map((each) => [each.type, each.disabled, %s])"
    assert page.run(boxes % "each.checked, each.ariaLabel") == [
        ["checkbox", True, True, "done"],
        ["checkbox", True, False, "to do"],
        ["checkbox", True, True, "done"],
    ]
    assert "[" not in page.text(".words") and "two <input>" in page.text(".words")


def test_reasoning_is_folded_and_a_code_block_can_be_copied(page):
    take(page, "a <b> ", "plan", field="reasoning_content")
    assert page.text(".thoughts summary") == "Reasoning, 2 tokens" and "a <b> plan" in page.text(".thoughts")
    assert not page.run("return document.querySelector('.thoughts').open || document.querySelector('.thoughts').hidden")
    take(page, "**q**\n\n> ```\n> x = 1\n>   y\n> ```\n")
    assert page.run("return [...document.querySelectorAll('.thoughts')].map((each) => each.hidden)") == [False, True]
    page.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.click(".code .copy")
    page.until("return document.querySelector('.code .copy').textContent == 'Copied'")
    assert page.run("return navigator.clipboard.readText()") == "x = 1\n  y"


def test_a_value_that_the_form_refuses_is_named_and_the_theme_is_kept(page):
    page.run("document.getElementById('temperature').value = 3; document.getElementById('words').value = 'one'")
    page.press(ENTER)
    assert page.until("return document.getElementById('reason').textContent").startswith("Temperature 3 is not taken: ")
    assert page.run("return [document.activeElement.id, document.querySelectorAll('#turns > *').length]") == [
        "temperature",
        0,
    ]
    page.run("document.getElementById('options').hidePopover()")
    theme = "return document.documentElement.dataset.theme"
    page.click("#theme")
    before = page.run(theme)
    page.run("location.reload()")
    page.until(f"return !document.getElementById('words').value && (() => {{ {READY} }})()")
    assert before in ("dark", "light") and page.run(theme) == before
    page.run("localStorage.clear()")


def test_dialogues_are_kept_edited_and_deleted(page):
    page.run("localStorage.clear(); document.getElementById('longest').value = 3")
    ask(page, "one", 1)
    ask(page, "two", 2)
    answer = page.text(".words")
    page.run("document.querySelectorAll('.edit')[1].click()")  # the edited dialogue is a new one
    assert page.run("return [words.value, document.querySelectorAll('.answer').length]") == ["two", 1]
    ask(page, "three", 2)
    page.click("#fresh")
    assert page.run("return document.getElementById('turns').childElementCount") == 0
    ask(page, "four", 1)
    page.click("[popovertarget=dialogues]")
    titles = "return [...document.querySelectorAll('.entry')].map((each) => each.firstChild.textContent)"
    assert page.run(titles) == ["four", "one", "one"]
    page.click("#kept li:last-child .entry")
    asked = "return [...document.querySelectorAll('.asked')].map((each) => each.textContent)"
    assert page.run(asked) == ["one", "two"] and page.text(".words") == answer
    assert page.run("return document.getElementById('longest').value") == "3"
    page.click("[popovertarget=dialogues]")
    page.click("#kept li:last-child .delete")  # the one on the page
    assert page.run(titles) == ["four", "one"] and page.run(asked) == []
    page.run("localStorage.setItem(Object.keys(localStorage)[0], '{}'); location.reload()")  # of another version
    page.until(READY)
    page.click("[popovertarget=dialogues]")
    assert len(page.run(titles)) == 1
    page.run("localStorage.clear()")
