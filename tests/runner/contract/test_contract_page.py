"""The program on the contract's page is complete and right."""

import re
import subprocess
import sys

from places import ROOT

PAGE = ROOT / "runner" / "contract.md"


def program(folder, changed=lambda text: text):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert source.count("\n") < 100 and "eagle3" not in source
    path = folder / "program.py"
    path.write_text(changed(source))
    return path


def run(path, artifact, prompt, budget):
    command = [sys.executable, "-W", "ignore", path, artifact, ",".join(map(str, prompt)), str(budget)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_program_gives_the_tokens_of_the_runner(model, artifact, tmp_path):
    path = program(tmp_path)
    for text, budget in (("def main(", 40), ("import re\n" * 330, 64)):  # the second ends with the context
        prompt = model.encode(text)
        done = run(path, artifact, prompt, budget)
        assert done.returncode == 0, done.stderr
        model.forget()
        expected = model.generate(prompt, max_new_tokens=budget, ngram=False)
        assert [int(each) for each in done.stdout.splitlines()[-1].split()] == expected.token_ids


def test_the_program_refuses_methods_with_caches_of_their_own(artifact, tmp_path):
    def apart(text):
        shared = "methods = {name: program.load_method(name)"
        assert shared in text
        return text.replace(
            shared, 'methods = {name: Runtime.get().load_program(folder / "model.pte").load_method(name)'
        )

    done = run(program(tmp_path, apart), artifact, [3, 4, 5], 8)
    assert done.returncode == 1 and "caches of their own" in done.stderr
