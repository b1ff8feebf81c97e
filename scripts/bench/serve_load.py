"""Tests eagle3-serve under load: memory and answers over 1,000 requests; 100 schemas with and without speculation.

eagle3-serve out --default temperature=0 & python scripts/bench/serve_load.py http://127.0.0.1:8000/v1 PID
python scripts/bench/serve_load.py --schemas out
"""

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REQUESTS, CLIENTS = 1000, 20


def schemas() -> list[dict[str, Any]]:
    """Return 100 JSON schemas: flat and nested objects, enums, patterns, lists, unions, recursion, numbers with bounds.
    Every string and list has a maximum length, so that even a tiny model ends it."""

    def thing(fields: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
        needed = [name for name in fields if name not in optional]
        return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}

    found: list[dict[str, Any]] = []
    for n in range(10):
        text, count = {"type": "string", "maxLength": 4 + 2 * n}, {"type": "integer", "minimum": -n, "maximum": 10**n}
        kinds = {"enum": [f"kind_{i}" for i in range(n + 2)]}
        listed = {"type": "array", "items": count, "minItems": n % 3, "maxItems": 2 + n % 4}
        node = thing({"value": count, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
        found += [
            thing({"name": text, "count": count, "kind": kinds}),
            thing({"outer": thing({"inner": thing({"flag": {"type": "boolean"}, "text": text})}), "n": count}),
            thing(
                {
                    "code": {"type": "string", "pattern": f"^[A-Z]{{{n + 1}}}-[0-9]{{2,4}}$"},
                    "on": {"format": "date", "type": "string"},
                }
            ),
            thing({"list": listed, "pairs": {"type": "array", "items": thing({"k": text, "v": kinds}), "maxItems": 2}}),
            {"$defs": {"node": node}, **thing({"head": kinds, "depth": {"const": n}})},
            thing({"either": {"anyOf": [text, count, {"type": "null"}]}, "both": {"type": "boolean"}}),
            thing(
                {
                    "ratio": {"type": "number", "minimum": 0, "maximum": n + 1},
                    "step": {"type": "integer", "multipleOf": n + 1, "maximum": 99, "minimum": 0},
                }
            ),
            thing({f"field_{i}": text for i in range(n + 1)} | {"last": kinds}, optional=("field_0",)),
            {"type": "array", "prefixItems": [kinds, count], "items": False, "minItems": 2, "maxItems": 2},
            thing(
                {
                    "mail": {"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{1,8}\.(com|org)$"},
                    "ip": {"type": "string", "format": "ipv4"},
                    "size": count,
                }
            ),
        ]
    return found


def run_schemas(artifact: str) -> None:
    """Run every schema with and without speculation, and print the numbers of valid and of equal texts, and both
    speeds."""
    from eagle3.runner import load

    model = load(artifact)
    seconds, tokens, rounds, valid, same = {None: 0.0, 0: 0.0}, 0, 0, 0, 0
    model.generate("x = ", max_new_tokens=9, structured_outputs={"json": {"type": "null"}})
    for schema in schemas():
        asked = {"structured_outputs": {"json": schema}, "max_new_tokens": 600}
        said = {}
        for chain in (None, 0):
            start = time.perf_counter()
            said[chain] = model.generate("record = ", chain_len=chain, **asked)
            seconds[chain] += time.perf_counter() - start
        result = said[None]
        same += result.token_ids == said[0].token_ids
        tokens += len(result.token_ids)
        rounds += result.stats.num_drafts
        valid += result.finish_reason == "stop" and fits(json.loads(result.text), schema)
    print(f"valid {valid} of {len(schemas())}, same as without speculation {same}, {tokens} tokens")
    print(f"tokens a round {(tokens - len(schemas())) / rounds:.2f}")
    for chain, name in ((None, "with"), (0, "without")):
        print(f"{name} speculation {tokens / seconds[chain]:.0f} tokens/s")


def fits(value: object, schema: dict[str, Any]) -> bool:
    """Check a value by jsonschema, which raises its own error. Without that package the schema is not checked."""
    try:
        import jsonschema
    except ImportError:
        return True
    jsonschema.validate(value, schema)
    return True


def memory(pid: str) -> float:
    """Return the resident memory of a process in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def run_load(url: str, pid: str) -> None:
    """Send 1,000 requests of many kinds in a row, then let 20 clients send at once; some of them disconnect."""
    import httpx

    client = httpx.Client(base_url=url, timeout=120)
    expected: dict[int, str] = {}

    def ask(number: int, via: httpx.Client) -> None:
        given: dict[str, Any] = {
            "prompt": f"def f{number % 50}(",
            "max_tokens": 16 + number % 50 % 7,
            "stream": number % 3 == 0,
        }
        if number % 5 == 0:
            given["structured_outputs"] = {"json": schemas()[number % 50]}
        answer = via.post("/completions", json=given)
        text = answer.text
        if given["stream"]:
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        else:
            text = answer.json()["choices"][0]["text"]
        if expected.setdefault(number % 50, text) != text:
            raise AssertionError(f"request {number} was answered differently than before")

    start = time.perf_counter()
    for number in range(REQUESTS):
        ask(number, client)
        if number + 1 in (100, 300, REQUESTS):
            print(f"after {number + 1}: {memory(pid):.1f} MB, {time.perf_counter() - start:.1f} s")

    def vanish(number: int) -> None:
        if number % 4 == 0:
            try:
                httpx.post(
                    f"{url}/completions", json={"prompt": "x", "max_tokens": 900, "ignore_eos": True}, timeout=0.05
                )
            except httpx.TimeoutException:
                return
        ask(number, client)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(vanish, range(400)))
    print(f"after {CLIENTS} clients at once: {memory(pid):.1f} MB")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1] == "--schemas":
        run_schemas(sys.argv[2])
    else:
        run_load(sys.argv[1], sys.argv[2])
