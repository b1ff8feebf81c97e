"""A plan imports no compiler, and a deferred import gives the real module when it is used."""

import json
import subprocess
import sys

HEAVY = ["torch._dynamo.utils", "torch._inductor", "torch.distributed.tensor", "torchao", "scipy", "executorch.exir"]


def printed_by(code: str) -> list:
    """Return the JSON list that a process running ``code`` prints last."""
    lines = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(lines.splitlines()[-1])


def test_a_dry_run_for_cuda_imports_no_compiler():
    code = f"""
import json, sys
from eagle3.export.cli import main
sys.argv = ["eagle3-export", "--target-model", "gemma4-tiny", "--backend", "xnnpack", "--dry-run"]
try:
    main()
except SystemExit as left:
    print(json.dumps([left.code, *(name for name in {HEAVY} if name in sys.modules)]))
"""
    assert printed_by(code) == [0]


def test_a_deferred_module_is_imported_when_it_is_used():
    code = """
import json, sys
from eagle3.export.patching.light_imports import PATCHED, imported_lightly
from eagle3.export.patching.patches import original
with imported_lightly():
    import torch
    late = [torch._dynamo.disable(len) is len, torch._dynamo.disable(recursive=False)(len) is len]
    stand_in = torch._dynamo
    from torch._dynamo.utils import counters
    late += [torch._dynamo is stand_in, torch._dynamo.utils.counters is counters]
    late += [stand_in.config is torch._dynamo.config]
    late += [stand_in.disable(len) is len, any(original(name)() for name in PATCHED)]
print(json.dumps([*late, all(original(name)() for name in PATCHED)]))
"""
    assert printed_by(code) == [True, True, False, True, True, False, False, True]


def test_an_unused_deferred_module_is_removed_afterwards():
    code = """
import json, sys
from eagle3.export.patching.light_imports import imported_lightly
with imported_lightly():
    pass
during = "torch._dynamo" in sys.modules
import torch._dynamo
print(json.dumps([during, hasattr(torch._dynamo, "__file__")]))
"""
    assert printed_by(code) == [False, True]
