"""Attacks an eagle3-serve on this machine, and measures the longest wait of 20 ordinary clients with and without
attacks.

eagle3-serve out --default temperature=0 & python scripts/bench/serve_attacks.py http://127.0.0.1:8000/v1

Each attack is sent by ATTACKERS clients at once for at most SECONDS. Only loopback addresses are accepted.
"""

import ipaddress
import json
import sys
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httpx

HONEST, ATTACKERS, SECONDS, MOST_SENT = 20, 2, 5.0, 200
ASKED = [{"role": "user", "content": "Open a file and read its lines."}]
PERSON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


def chat(**more: Any) -> tuple[str, bytes]:
    return "chat/completions", json.dumps({"messages": ASKED, "max_tokens": 8} | more).encode()


def schema(given: object) -> tuple[str, bytes]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": given}})


def attacks(number: int) -> dict[str, tuple[str, bytes]]:
    """Return a path and a body by the name of an attack. Each ``number`` gives new grammars, which no server has
    compiled."""
    loops = "{% for i in range(15000) %}{% for j in range(15000) %}{% endfor %}{% endfor %}x"
    patterns = {f"^[a-z]{{{i % 9 + 1},{i % 50 + 9}}}x{i}y{number}$": {"type": "string"} for i in range(399)}
    ranges = [{"type": "string", "pattern": f"a{{{i},{i + 5000 + number}}}"} for i in range(60)]
    return {
        "template of loops": chat(chat_template_kwargs={"chat_template": loops}),
        "template of 1.5 GB": chat(chat_template_kwargs={"chat_template": "{{ ('a' * 1500000000)|length }}"}),
        "90,000 choices": chat(structured_outputs={"choice": [f"choice {i} {number}" for i in range(90_000)]}),
        "900 choices": chat(structured_outputs={"choice": [f"choice {i} {number}" for i in range(900)]}),
        "399 patterns": schema({"type": "object", "patternProperties": patterns}),
        "60 ranges": schema({"allOf": ranges}),
        "const of 500,000": schema({"const": f"{number} " * 250_000}),
        "const of 14,000": schema({"const": f"{number} " * 4_000}),
        "999 stop strings": chat(stop=[f"{i:0500}" for i in range(999)]),
        "a million prompts": ("completions", json.dumps({"prompt": ["x"] * 900_000}).encode()),
        "150,000 biases": chat(logit_bias={str(i): 1 for i in range(150_000)}),
        "5,000 messages": chat(messages=ASKED * 5000),
        "a deep schema": schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)),
        "a schema without a text": schema({"$ref": "#"}),
        "100 choices": chat(n=100),
        "4 MB of brackets": ("completions", b'{"prompt": [' + b"[]," * 1_300_000 + b"[]]}"),
    }


class Ordinary:
    """Ordinary clients that request short answers one after the other, every fourth a structured one. ``longest`` is
    the longest wait in seconds."""

    def __init__(self, url: str):
        self._url, self._over = url, threading.Event()
        self.longest, self.statuses = 0.0, Counter[int]()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(HONEST)]

    def __enter__(self) -> "Ordinary":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        given: dict[str, Any] = {"prompt": f"def f{number}(", "max_tokens": 8}
        if number % 4 == 0:
            given["structured_outputs"] = {"json": PERSON}
        with httpx.Client(timeout=300) as client:
            while not self._over.is_set():
                start = time.perf_counter()
                status = client.post(f"{self._url}/completions", json=given).status_code
                self.longest = max(self.longest, time.perf_counter() - start)
                self.statuses[status] += 1


def attack(url: str, name: str) -> tuple[Counter[int], float]:
    """Send an attack from ATTACKERS clients for SECONDS; returns the statuses and the seconds of the longest answer."""
    statuses, longest, end = Counter[int](), [0.0], time.monotonic() + SECONDS

    def send(first: int) -> None:
        with httpx.Client(timeout=300) as client:
            for number in range(first, first + MOST_SENT // ATTACKERS):
                if time.monotonic() > end:
                    return
                path, body = attacks(number)[name]
                start = time.perf_counter()
                answer = client.post(f"{url}/{path}", content=body, headers={"Content-Type": "application/json"})
                longest[0] = max(longest[0], time.perf_counter() - start)
                statuses[answer.status_code] += 1

    threads = [threading.Thread(target=send, args=(1000 * number,)) for number in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, longest[0]


def main(url: str) -> None:
    """Print a table row for each attack."""
    host = urlsplit(url).hostname or ""
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise SystemExit(f"{host} is not this machine: only 127.0.0.1 is attacked")
    with Ordinary(url) as alone:
        time.sleep(2 * SECONDS)
    print(f"20 ordinary clients alone: longest wait {alone.longest:.2f} s, {dict(alone.statuses)}")
    print("| attack | statuses | longest wait | ordinary: longest wait | statuses |\n| --- | --- | --- | --- | --- |")
    for name in attacks(0):
        with Ordinary(url) as ordinary:
            statuses, longest = attack(url, name)
        print(f"| {name} | {dict(statuses)} | {longest:.2f} s | {ordinary.longest:.2f} s | {dict(ordinary.statuses)} |")


if __name__ == "__main__":
    main(sys.argv[1])
