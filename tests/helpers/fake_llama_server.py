"""A fake llama-server with given speeds. It has the flags, routes, answers and log lines of llama.cpp's own server.

``plan.json`` beside it has ``speeds``: tokens per second by setting ("q8_0 3 f32 on": target's type, chain length,
draft's type, backend sampling) or by setting and number of new tokens ("q8_0 3 f32 on 64"), and ``default`` for all
others. It may also have lists of settings that fail: with ``starts_not`` the server does not start, with ``ends`` it
ends and with ``refuses`` it reports an error at the second request. The first response of each server is a hundred
times slower, as with cold caches.
"""

import json
import os
import socket
import sys
from pathlib import Path

VALUES = {"-m", "-c", "-np", "-t", "-ctk", "-ctv", "--cache-ram", "--ctx-checkpoints", "-lv", "--port"}
DRAFT_VALUES = {"-md", "-ctkd", "-ctvd", "--spec-type", "--spec-draft-n-max"}
SAMPLING = {"--spec-draft-backend-sampling": "on", "--no-spec-draft-backend-sampling": "off"}
STATISTICS = (
    "0.10.2 T spec common_specu: statistics     draft-eagle3: #calls(b,g,a) =    1      4      4, "
    "#acc rate/pos = ({}), dur(b,g,a) = 0.015, 214.512, 0.155 ms\n"
)


def say(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def fail(line: str) -> None:
    say(f"0.00.1 E {line}\n")
    sys.exit(1)


def parse(words: list[str]) -> dict[str, str]:
    given, words = {"sampling": "on"}, iter(words)
    for name in os.environ:
        if name.startswith("LLAMA_ARG_"):
            fail(f"error: {name} takes the place of a flag")
    for word in words:
        if word in SAMPLING:
            given["sampling"] = SAMPLING[word]
        elif word in VALUES | DRAFT_VALUES:
            given[word] = next(words)
        else:
            fail(f"error: invalid argument: {word}")
    return given


def model_type(file: str, part: str) -> str:
    """Return the type of the weights of a GGUF file that the fake tools made."""
    if not Path(file).is_file():
        fail(f"failed to load model '{file}'")
    found = json.loads(Path(file).read_text())
    if found["part"] != part:
        fail(f"draft model is not eagle3: {file}")
    return found["type"]


def setting_of(given: dict[str, str]) -> str:
    weights = model_type(given["-m"], "target")
    if "-md" not in given:
        return f"{weights} 0"
    if given.get("--spec-type") != "draft-eagle3":
        fail("no implementations specified for speculative decoding")
    return f"{weights} {given['--spec-draft-n-max']} {model_type(given['-md'], 'draft')} {given['sampling']}"


def main() -> None:
    plan = json.loads(Path(__file__).with_name("plan.json").read_text())
    given = parse(sys.argv[1:])
    setting = setting_of(given)
    if setting in plan.get("starts_not", ()):
        fail("unable to allocate the context")
    with Path(__file__).with_name("served.jsonl").open("a") as served:
        served.write(json.dumps({"setting": setting, "threads": given["-t"], "context": given["-c"]}) + "\n")
    answered = 0
    with socket.create_server(("127.0.0.1", int(given["--port"]))) as listening:
        while True:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as stream:
                method, path, _ = stream.readline().decode().split()
                headers = dict(line.decode().lower().split(": ") for line in iter(stream.readline, b"\r\n"))
                body = stream.read(int(headers.get("content-length", 0)))
                status, reply = 200, {"status": "ok"}
                if (method, path) == ("POST", "/completion"):
                    answered += 1
                    status, reply = answer(plan, setting, json.loads(body), answered)
                    if "-md" in given and int(given["-lv"]) >= 4:
                        say(STATISTICS.format(", ".join(["0.500"] * int(given["--spec-draft-n-max"]))))
                content = json.dumps(reply).encode()
                head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + content)


def answer(plan: dict, setting: str, asked: dict, answered: int) -> tuple[int, dict]:
    count, prompt = asked["n_predict"], asked["prompt"]
    names = setting, f"{setting} {count}"
    if answered > 1 and any(name in plan.get("ends", ()) for name in names):
        fail("GGML_ASSERT(n_tokens > 0) failed")
    if answered > 1 and any(name in plan.get("refuses", ()) for name in names):
        return 500, {"error": {"code": 500, "message": "failed to process batch", "type": "server_error"}}
    speed = next((plan["speeds"][name] for name in reversed(names) if name in plan["speeds"]), plan["default"])
    predicted_ms = 1000 * (count - 1) / speed * (100 if answered == 1 else 1)
    timings = {"prompt_n": len(prompt), "prompt_ms": 1.0, "predicted_n": count, "predicted_ms": predicted_ms}
    return 200, {"content": "", "tokens": [7] * count, "stop": True, "stop_type": "limit", "timings": timings}


if __name__ == "__main__":
    main()
