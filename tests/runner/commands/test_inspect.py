"""The report of eagle3-inspect on the exported gemma4-tiny is correct, and shows the intended lowering."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from commands import fail_command, run_command
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.inspect import main
from eagle3.runner.contract import (
    DECODE,
    DRAFT_DECODE,
    METHODS,
    MODEL_FILE,
    PREFILL,
    READ_STATE,
    TARGET_VERIFY,
    WRITE_STATE,
    Metadata,
)
from eagle3.runner.hosts.executorch_host import load_runtime

ALL_METHODS = (*METHODS, DECODE)
TARGET_METHODS = (PREFILL, TARGET_VERIFY, DECODE)
STATE_METHODS = (READ_STATE, WRITE_STATE)


def inspect(artifact, *flags):
    return json.loads(run_command(main, artifact, "--json", *flags).stdout)


@pytest.fixture(scope="module")
def found(artifact):
    return inspect(artifact)


@pytest.fixture
def copied(artifact, tmp_path):
    return shutil.copytree(artifact, tmp_path / "copy")


def tensors(entries):
    return [(entry["dtype"], entry["shape"]) for entry in entries]


def test_every_method_has_the_rows_of_the_contract(found):
    metadata = found["metadata"]
    longest, window = metadata["get_max_prefill_chunk"], metadata["get_chain_len"] + 1
    assert {name: tuple((method["rows"] or {}).values()) for name, method in found["methods"].items()} == {
        PREFILL: (metadata["get_min_prefill_chunk"], longest),
        TARGET_VERIFY: (2, window),
        DRAFT_DECODE: (1, max(longest, window)),
        DECODE: (1, 1),
        **dict.fromkeys(STATE_METHODS, ()),
    }
    for name, method in found["methods"].items():
        assert method["dynamic_length"] == (name in ALL_METHODS and method["rows"]["min"] < method["rows"]["max"])


@pytest.mark.parametrize("name", ALL_METHODS)
def test_inspected_shapes_are_the_contracts_and_the_runtimes_at_the_maximum_rows(name, found, artifact):
    method = found["methods"][name]
    most = method["rows"]["max"]
    hidden = found["methods"][DECODE]["outputs"][1]["shape"][-1]
    feature = [("float32", [1, most, hidden])] if name == DRAFT_DECODE else []
    assert tensors(method["inputs"]) == [("int64", [1, most]), *feature, ("int64", [most])]
    ids = most if name == TARGET_VERIFY else 1
    recurrent = 1 if name == DRAFT_DECODE else most
    vocabulary = found["metadata"]["get_draft_vocab_size" if name == DRAFT_DECODE else "get_vocab_size"]
    assert tensors(method["outputs"]) == [
        ("int64", [1, ids]),
        ("float32", [1, recurrent, hidden]),
        ("float32", [1, ids, vocabulary]),
    ]
    declared = load_runtime().load_program(artifact / MODEL_FILE).metadata(name)
    sizes = [declared.input_tensor_meta(slot).sizes() for slot in range(declared.num_inputs())]
    sizes += [declared.output_tensor_meta(slot).sizes() for slot in range(declared.num_outputs())]
    assert [entry["shape"] for entry in method["inputs"] + method["outputs"]] == list(map(list, sizes))


@pytest.mark.parametrize("name", ALL_METHODS)
def test_linear_algebra_norms_and_rotary_embeddings_are_delegated_to_xnnpack(name, found):
    """Delegates end only at attention, which is the purpose of export/lowering/xnnpack/forms.py."""
    method = found["methods"][name]
    assert list(method["delegates"]) == ["XnnpackBackend"]
    delegate, outside = method["delegates"]["XnnpackBackend"], {op.split(".")[0] for op in method["operators"]}
    assert 0 < delegate["count"] <= 3 * found["metadata"]["get_n_layers"] and delegate["named_data"]["count"] > 0
    assert not {f"aten::{op}" for op in ("linear", "mm", "bmm", "addmm", "native_layer_norm", "rsqrt")} & outside
    assert method["instructions"] >= sum(method["operators"].values()) + delegate["count"]
    if name in TARGET_METHODS:
        slices = sum(count for op, count in method["operators"].items() if op.startswith("aten::slice_copy"))
        assert slices == (name == PREFILL) and "aten::mean" not in outside  # prefill takes its last row for the logits


@pytest.mark.parametrize("name", ALL_METHODS)
def test_attention_and_caches_use_the_llm_ops_without_copying_a_cache(name, found):
    operators, layers = found["methods"][name]["operators"], found["metadata"]["get_n_layers"]
    attention_layers = 1 if name == DRAFT_DECODE else layers
    assert operators["llama::custom_sdpa.out"] == attention_layers
    updates = operators.get("llama::update_cache.out", 0) + operators.get("llama::update_cache_with_indices.out", 0)
    assert updates == 2 * attention_layers
    for op in operators:
        assert not op.startswith(
            ("aten::index_put", "aten::index_copy", "aten::copy", "aten::_softmax", "aten::bmm")
        ), op
    # The positions of the ring take one product per method; attention would take some in each layer.
    assert sum(count for op, count in operators.items() if op.startswith("aten::mul")) <= 1


def test_the_targets_methods_share_one_cache_and_the_draft_has_its_own(found):
    """The methods of the state share both: every buffer takes part."""
    buffers = found["mutable_buffers"]
    assert len({buffer["name"] for buffer in buffers}) == len(buffers)  # each at one place, whatever the method
    users = [tuple(buffer["methods"]) for buffer in buffers]
    of_target, of_draft = (*TARGET_METHODS, *STATE_METHODS), (DRAFT_DECODE, *STATE_METHODS)
    assert users.count(of_target) == 2 * found["metadata"]["get_n_layers"]
    assert users.count(of_draft) == 2
    assert len(users) == users.count(of_target) + 2
    for method in found["methods"].values():
        (arena,) = [arena for arena in method["planned_memory"] if arena["mutable"]]
        assert arena["bytes"] >= sum(buffer["bytes"] for buffer in buffers)


def test_metadata_is_the_contract_with_the_manifest_expanded(found, artifact):
    methods = [field.metadata["method"] for field in fields(Metadata)]
    others = {"get_proposals", "get_max_context_len", "get_rollback_rows"}  # P-EAGLE, --with-forward, recurrent layers
    others |= {"get_has_draft_cache", "get_has_draft", "get_verify_rows"}  # assistants, --draft none, --verify-rows
    others.add("get_served_by")  # --backend mlx
    assert list(found["metadata"]) == [name for name in methods if name not in others]
    opened = open_artifact(artifact).metadata
    expected = opened.constant_methods() | {"get_manifest": opened.manifest}
    expected["get_draft_ids"] = {"dtype": "int64", "shape": [1024]}
    assert found["metadata"] == json.loads(json.dumps(expected))
    assert found["metadata"]["get_manifest"]["backend"] == "xnnpack"


def test_each_byte_of_the_file_is_counted_once(found, artifact):
    weights = found["weights"]
    parts = [part["bytes"] for part in weights.values() if isinstance(part, dict)]
    assert weights["file_bytes"] == (artifact / "model.pte").stat().st_size
    assert weights["program_bytes"] + sum(parts) + weights["padding_bytes"] == weights["file_bytes"]
    assert 0 <= weights["padding_bytes"] < 0.01 * weights["file_bytes"]
    assert (
        0 <= weights["constants"]["bytes"] - sum(e["bytes"] for e in weights["constants"]["by_dtype"].values()) < 4096
    )


def test_methods_share_their_weights(found, artifact):
    """No method has a copy of its own: the file is little larger than the parameters in float32."""
    record = json.loads((artifact / "export.json").read_text())
    parameters = 4 * (record["target_parameters"] + record["draft_parameters"])
    assert found["weights"]["file_bytes"] < 1.2 * parameters
    delegates = {name: found["methods"][name]["delegates"]["XnnpackBackend"] for name in ALL_METHODS}
    read = {name: delegate["named_data"]["bytes"] for name, delegate in delegates.items()}
    assert len({read[name] for name in TARGET_METHODS}) == 1
    assert max(read.values()) < found["weights"]["named_data"]["bytes"] < sum(read.values())


def test_inspect_tables_name_every_method_operator_and_file(found, artifact):
    text = run_command(main, artifact).stdout
    operators = {op for method in found["methods"].values() for op in method["operators"]}
    files = {entry["name"] for entry in found["files"]}
    for word in {*found["methods"], *operators, *files, "get_max_seq_len", "manifest.taps", "XnnpackBackend"}:
        assert word in text
    assert f"{found['weights']['file_bytes']:,}" in text


def test_verify_says_what_was_read_and_no_compiler_is_imported(artifact):
    code = "import sys; from eagle3.runner.commands.inspect import main; sys.argv = sys.argv[1:]\ntry:\n    main()\n"
    code += (
        "finally:\n    print(*(name for name in ('executorch.exir.capture', 'torch._inductor') if name in sys.modules))"
    )
    command = [sys.executable, "-c", code, "eagle3-inspect", artifact, "--verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown, compilers = done.stdout.splitlines()
    sizes = [entry["bytes"] for entry in json.loads(shown)["files"] if entry["matches_record"]]
    assert compilers == "" and f"verified: {len(sizes)} files, {sum(sizes):,} bytes, have the sha256" in done.stderr


def test_checksums_of_small_files_are_always_compared_and_all_others_with_verify(found, artifact, monkeypatch):
    sizes = {entry["name"]: entry["bytes"] for entry in found["files"]}
    assert sizes == {path.name: path.stat().st_size for path in artifact.iterdir()}
    assert {entry["matches_record"] for entry in found["files"] if entry["name"] != "export.json"} == {True}
    monkeypatch.setattr("eagle3.runner.artifact.record.QUICK_BYTES", 0)
    assert {entry["matches_record"] for entry in inspect(artifact)["files"]} == {None}
    verified = {entry["name"]: entry["matches_record"] for entry in inspect(artifact, "--verify")["files"]}
    assert verified.pop("export.json") is None
    assert set(verified.values()) == {True}


def test_a_missing_file_is_listed_and_fails_verification(copied):
    (copied / "tokenizer.json").unlink()
    entry = next(entry for entry in inspect(copied)["files"] if entry["name"] == "tokenizer.json")
    assert entry == {"name": "tokenizer.json", "bytes": None, "matches_record": False}
    assert "tokenizer.json" in fail_command(main, copied, "--verify")[1]


def test_inspect_reports_a_file_that_is_no_program_in_one_line_with_exit_1(copied):
    (copied / "model.pte").write_bytes(b"PK\x03\x04" + bytes(2000))
    code, line = fail_command(main, copied)
    assert code == 1
    assert "is no ExecuTorch program" in line


def test_inspect_reports_a_program_that_points_outside_itself_in_one_line(copied):
    """The file opens, since the runtime reads only the constant methods, and reads a method when it loads it."""
    model = copied / "model.pte"
    pte = deserialize_pte_binary(model.read_bytes())
    plan = next(plan for plan in pte.program.execution_plan if plan.name == PREFILL)
    call = next(i.instr_args for i in plan.chains[0].instructions if hasattr(i.instr_args, "op_index"))
    call.op_index = len(plan.operators)
    model.write_bytes(bytes(serialize_pte_binary(pte)))
    (copied / "export.json").unlink()  # its sha256 would reveal the damage first
    code, line = fail_command(main, copied)
    assert code == 1
    assert "points outside itself" in line
