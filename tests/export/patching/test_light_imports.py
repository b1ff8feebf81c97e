"""A plan imports neither Inductor nor ExecuTorch's compiler."""

import json
import subprocess
import sys

import pytest

COMPILERS = ["torch._inductor.compile_fx", "executorch.exir"]


def printed_by(code: str) -> list:
    """Return the JSON list that a process running ``code`` prints last."""
    lines = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(lines.splitlines()[-1])


@pytest.mark.whole
def test_a_dry_run_for_cuda_imports_no_compiler():
    code = f"""
import json, sys
from eagle3.export.cli import main
sys.argv = ["eagle3-export", "--target-model", "gemma4-tiny", "--backend", "xnnpack", "--dry-run"]
try:
    main()
except SystemExit as left:
    print(json.dumps([left.code, *(name for name in {COMPILERS} if name in sys.modules)]))
"""
    assert printed_by(code) == [0]
