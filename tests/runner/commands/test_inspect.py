"""The report of eagle3-inspect on the exported gemma4-tiny is correct, and shows the intended lowering."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from commands import fail_command, run_command
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from safetensors.torch import load_file

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.inspect import main
from eagle3.runner.contract import DECODE, DRAFT_DECODE, METHODS, MODEL_FILE, PREFILL, TARGET_VERIFY, Metadata
from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.targets import TARGETS

ALL_METHODS = (*METHODS, DECODE)
TARGET_METHODS = (PREFILL, TARGET_VERIFY, DECODE)


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
    assert {name: tuple(method["rows"].values()) for name, method in found["methods"].items()} == {
        PREFILL: (metadata["get_min_prefill_chunk"], longest),
        TARGET_VERIFY: (2, window),
        DRAFT_DECODE: (1, max(longest, window)),
        DECODE: (1, 1),
    }
    for method in found["methods"].values():
        assert method["dynamic_length"] == (method["rows"]["min"] < method["rows"]["max"])


@pytest.mark.parametrize("name", ALL_METHODS)
def test_inspected_shapes_are_the_contracts_at_the_maximum_rows(name, found):
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


@pytest.mark.parametrize("name", ALL_METHODS)
def test_inspected_shapes_equal_those_that_the_runtime_declares(name, found, artifact):
    declared = load_runtime().load_program(artifact / MODEL_FILE).metadata(name)
    method = found["methods"][name]
    for entries, count, meta in (
        (method["inputs"], declared.num_inputs(), declared.input_tensor_meta),
        (method["outputs"], declared.num_outputs(), declared.output_tensor_meta),
    ):
        assert [entry["shape"] for entry in entries] == [list(meta(slot).sizes()) for slot in range(count)]


@pytest.mark.parametrize("name", ALL_METHODS)
def test_linear_algebra_is_delegated_to_xnnpack(name, found):
    method = found["methods"][name]
    assert list(method["delegates"]) == ["XnnpackBackend"]
    delegate = method["delegates"]["XnnpackBackend"]
    assert delegate["count"] > 0
    assert delegate["named_data"]["count"] > 0
    outside = set(method["operators"])
    assert not {f"aten::{op}.out" for op in ("linear", "mm", "bmm", "addmm", "native_layer_norm")} & outside
    assert method["instructions"] >= sum(method["operators"].values()) + delegate["count"]


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
    buffers = found["mutable_buffers"]
    assert len({buffer["name"] for buffer in buffers}) == len(buffers)  # each at one place, whatever the method
    users = [tuple(buffer["methods"]) for buffer in buffers]
    assert users.count(TARGET_METHODS) == 2 * found["metadata"]["get_n_layers"]
    assert users.count((DRAFT_DECODE,)) == 2
    assert len(users) == users.count(TARGET_METHODS) + 2
    for method in found["methods"].values():
        (arena,) = [arena for arena in method["planned_memory"] if arena["mutable"]]
        assert arena["bytes"] >= sum(buffer["bytes"] for buffer in buffers)


def test_metadata_is_the_contract_with_the_manifest_expanded(found, artifact):
    methods = [field.metadata["method"] for field in fields(Metadata)]
    others = {"get_proposals", "get_max_context_len", "get_rollback_rows"}  # P-EAGLE, --with-forward, recurrent layers
    others |= {"get_has_draft_cache", "get_has_draft", "get_verify_rows"}  # assistants, --draft none, --verify-rows
    assert list(found["metadata"]) == [name for name in methods if name not in others]
    opened = open_artifact(artifact).metadata
    expected = opened.constant_methods() | {"get_manifest": opened.manifest}
    expected["get_draft_ids"] = {"dtype": "int64", "shape": [1024]}
    assert found["metadata"] == json.loads(json.dumps(expected))
    assert found["metadata"]["get_manifest"]["backend"] == "xnnpack"


def test_metadata_announces_logits_and_the_draft_ids_of_the_vocabulary_map(found, artifact):
    assert found["metadata"]["get_has_logits"] is True
    assert found["metadata"]["get_manifest"]["format_version"] == 3
    offsets = load_file(TARGETS["gemma4-tiny"].draft / "model.safetensors")["d2t"]
    assert torch.equal(open_artifact(artifact).metadata.draft_ids, torch.arange(1024) + offsets)


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
    read = {name: m["delegates"]["XnnpackBackend"]["named_data"]["bytes"] for name, m in found["methods"].items()}
    assert len({read[name] for name in TARGET_METHODS}) == 1
    assert max(read.values()) < found["weights"]["named_data"]["bytes"] < sum(read.values())


def test_a_model_pte_alone_is_inspected_like_its_folder(found, artifact):
    assert inspect(artifact / "model.pte") == found


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


def test_a_flipped_bit_in_the_weights_fails_verification_by_name(copied):
    model = copied / "model.pte"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    code, line = fail_command(main, copied, "--verify")
    assert code == 1
    assert "model.pte is damaged" in line and "export.json says" in line


def test_a_missing_file_is_listed_and_fails_verification(copied):
    (copied / "tokenizer.json").unlink()
    entry = next(entry for entry in inspect(copied)["files"] if entry["name"] == "tokenizer.json")
    assert entry == {"name": "tokenizer.json", "bytes": None, "matches_record": False}
    assert "tokenizer.json" in fail_command(main, copied, "--verify")[1]


def test_without_a_record_only_verification_fails(copied):
    (copied / "export.json").unlink()
    assert [entry["name"] for entry in inspect(copied)["files"]] == ["model.pte"]
    assert "nothing to verify against" in fail_command(main, copied, "--verify")[1]


@pytest.mark.parametrize("record", ["", "[]", '{"files": {"model.pte": 1}}'])
def test_a_damaged_record_is_named(record, copied):
    (copied / "export.json").write_text(record)
    code, line = fail_command(main, copied)
    assert code == 1
    assert "export.json is not what eagle3-export writes" in line


@pytest.mark.parametrize("part", [0.0002, 0.7])
def test_inspect_reports_a_truncated_file_in_one_line_with_exit_1(part, copied):
    """The command runs in a process of its own, to check that the runtime's own messages are not printed."""
    model = copied / "model.pte"
    with model.open("r+b") as file:
        file.truncate(int(part * model.stat().st_size))
    program = "from eagle3.runner.commands.inspect import main; main()"
    done = subprocess.run([sys.executable, "-c", program, copied], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {model} is damaged")


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


def test_norms_and_rotary_embeddings_stay_inside_the_delegates(found):
    """Delegates end only at attention, which is the purpose of export/lowering/xnnpack/forms.py."""
    for name in TARGET_METHODS:
        method = found["methods"][name]
        assert method["delegates"]["XnnpackBackend"]["count"] <= 3 * found["metadata"]["get_n_layers"]
        assert not {op.split(".")[0] for op in method["operators"]} & {"aten::mean", "aten::rsqrt"}
        slices = sum(count for op, count in method["operators"].items() if op.startswith("aten::slice_copy"))
        assert slices == (name == PREFILL)  # prefill takes its last row for the logits
