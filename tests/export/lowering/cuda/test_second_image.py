"""A kernel of many rows for sm_90 has a second image with wgmma: what the images hold, and when one is refused."""

import re
import subprocess
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_lowered import lowered
from kernel_inputs import Int4Linear, activations
from machine_code import bounds
from machine_code.barriers import faults
from machine_code.libraries import preferred
from machine_code.sass import disassembler, images, read_codes, read_usages
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType
from torch.export import Dim
from triton import Config
from triton.runtime.errors import OutOfResources

from eagle3.export.lowering.cuda.kernels import attention_chunk, large_m, sums
from eagle3.export.lowering.cuda.kernels.attention import attention
from eagle3.export.lowering.cuda.named_gpu import fatbins as fatbins_of_a_list
from eagle3.export.lowering.cuda.named_gpu import second_image
from eagle3.export.lowering.cuda.named_gpu.fatbins import Fatbins, Packed
from eagle3.export.lowering.cuda.named_gpu.second_image import (
    OwnImage,
    SecondImages,
    check_one_host,
    own_config,
    plain_configs,
)
from eagle3.runner.artifact.cuda_library import fatbin_entries, read_library
from eagle3.runner.contract import TARGET_VERIFY
from eagle3.runner.system.gpus import BY_ARCH, GPUS, Gpu, lacking_on_later

ROWS, WIDTH, SLOTS, OUTPUTS = 512, 2048, 4096, 5376


class Layer(torch.nn.Module):
    """An INT4 linear, a bfloat16 one and attention with heads of 512, all of the same rows."""

    def __init__(self):
        super().__init__()
        self.int4 = Int4Linear(256, WIDTH)
        self.linear = torch.nn.Linear(WIDTH, OUTPUTS, bias=False, dtype=torch.bfloat16)
        self.register_buffer("cache", torch.zeros(1, 1, SLOTS, 512).bfloat16())

    def forward(self, x, last):
        given = torch.zeros_like(last), last, self.int4.arrived, 0.1, SLOTS, 0
        return self.int4(x), self.linear(x), attention(x.view(1, x.shape[0], -1, 512), self.cache, self.cache, *given)


@pytest.fixture(scope="module")
def on_hopper():
    """The recorded launches of a layer of many rows, and its kernels' fatbins."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: nothing is substituted")
    rows = {0: Dim("rows", min=33, max=1024)}
    given = activations(ROWS, WIDTH), torch.arange(ROWS)
    with sums.made_for_named("sm_90"):
        _, graph = lowered(Layer(), given, rows=ROWS, library=True, dynamic_shapes=(rows, rows))
    return graph.recorded, read_library(graph.library).kernels, graph.wrappers


INT4, TEMPLATE, ATTENTION = KINDS = "_int4_matmul_kernel", "triton_tem", "_attention_chunk_kernel"


@pytest.fixture(scope="module")
def entries(on_hopper) -> dict[str, dict]:
    """The recorded launches by the beginning of their kernels' names."""
    launches = on_hopper[0]["launches"]
    named = {name: [each for each in launches if each["kernel"].startswith(name)] for name in KINDS}
    return {name: entry for name, (entry,) in named.items()}


@pytest.fixture(scope="module")
def fatbins(on_hopper, entries) -> dict[str, bytes]:
    return {name: on_hopper[1][entry["kernel"]] for name, entry in entries.items()}


@pytest.fixture(scope="module")
def fatbin(fatbins) -> bytes:
    return fatbins[INT4]


def printed(fatbin: bytes, folder, form: str) -> str:
    file = folder / "kernel.fatbin"
    file.write_bytes(fatbin)
    return subprocess.run([disassembler(), form, file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_fatbin_has_both_images_and_wgmma_in_one_of_them(fatbins, kind, tmp_path):
    fatbin = fatbins[kind]
    assert list(fatbin_entries(fatbin)) == [("sass", "sm_90"), ("ptx", "sm_90"), ("sass", "sm_90a")]
    codes = images(printed(fatbin, tmp_path, "-sass"), "elf")
    assert "HMMA.16816" in codes["sm_90"] and "HGMMA" not in codes["sm_90"]
    assert "HGMMA.64x" in codes["sm_90a"] and not re.search(r"\bHMMA", codes["sm_90a"])
    assert all(read_codes([fatbin], capability)[fatbin].spill_bytes == 0 for capability in ((8, 9), (9, 0)))


def test_the_decoded_weights_are_an_operand_in_registers(fatbin, tmp_path):
    codes = images(printed(fatbin, tmp_path, "-sass"), "elf")
    # The rows of x are one in shared memory.
    operands = re.findall(r"HGMMA\.64x128x16\.F32\.BF16 R\d+, (\w+), (\w+)\[", codes["sm_90a"])
    assert len(operands) == 8 and all(a.startswith("R") and x == "gdesc" for a, x in operands)


def test_the_second_image_waits_once_for_each_dot_and_spills_no_registers(fatbin, tmp_path):
    code, plain = read_codes([fatbin], (9, 0))[fatbin], read_codes([fatbin], (8, 9))[fatbin]
    (loop,) = (loop for loop in code.loops if loop.multiply_adds)
    assert loop.warp_group and loop.multiply_adds * large_m.WARPS == 128 * 128 * 64
    text = images(printed(fatbin, tmp_path, "-sass"), "elf")["sm_90a"]
    # ptxas would wait behind each of the 8 products if it could not keep them apart from other instructions.
    assert text.count("WARPGROUP.DEPBAR") == 2 and text.count("gsb0") - text.count("DEPBAR.LE gsb0") == 2
    usage = read_usages([fatbin])[fatbin]
    assert code.spill_bytes == plain.spill_bytes == usage.spill_bytes == 0
    assert usage.registers == max(code.registers, plain.registers) <= 255 and usage.threads == 128
    weights = 128 * 64
    assert loop.instructions * 128 / weights <= 6.6
    assert min(loop.instructions for loop in plain.loops if loop.multiply_adds) * 128 / weights <= 7.2


def test_each_image_has_its_own_shared_memory_and_two_programs_fit(entries):
    launch = entries[INT4]
    x, words = 128 * 64 * 2 * large_m.STAGES, 128 * 8 * 4 * (large_m.STAGES - 1)
    assert launch["grid"][:2] == (ROWS // 128, 2) and launch["threads"] == 128
    own, plain = launch["cards"]
    assert (own["first"], plain["first"]) == (90, 91) and own["threads"] == plain["threads"] == 128
    assert own["shared_bytes"] == launch["shared_bytes"] >= x + words
    assert plain["shared_bytes"] < own["shared_bytes"] - x // 2 + 4096  # half of the rows at a time
    assert GPUS["H200"].resident(255, launch["shared_bytes"], launch["threads"]) == 2


def test_the_plain_image_of_attention_has_a_configuration_of_its_own_that_every_later_gpu_can_launch(entries):
    """With the warps and the 196,608 bytes of the second image, an RTX 5090 would refuse it."""
    own, plain = entries[ATTENTION]["cards"]
    assert own["threads"] == 256 and own["shared_bytes"] > 150 << 10
    assert plain["shared_bytes"] <= GPUS["RTX 5090"].shared_memory_per_block
    assert own["constants"]["ROWS"] == 64 and plain["constants"]["ROWS"] == 32
    assert lacking_on_later("sm_90", {TARGET_VERIFY: [entries[INT4], entries[ATTENTION]]}) == {}


def test_the_library_asks_the_gpu_for_its_launch(on_hopper, entries):
    """Kernels whose images have one launch are launched as before."""
    sources = on_hopper[2]
    for entry in entries.values():
        cards = ", ".join(
            f"{{{card['first']}, {card['threads'] // 32}, {card['shared_bytes']}, 0, 0}}"
            for card in entry.get("cards", ())
        )
        assert (f"cards_[] = {{{cards}}};" in sources) == bool(cards)


TOKENS = 1024


def counted(on_hopper, entries: dict[str, dict], gpus: list[Gpu]) -> dict[str, dict]:
    """Return the figures of kernels with a context of ``TOKENS``, by the beginning of their names."""
    launches = {TARGET_VERIFY: on_hopper[0] | {"launches": list(entries.values())}}
    context = bounds.Context(TOKENS, SLOTS) if ATTENTION in entries else bounds.NO_CONTEXT
    found = bounds.cost(launches, {TARGET_VERIFY: on_hopper[1]}, gpus, 1, context)["methods"][TARGET_VERIFY]
    return dict(zip(entries, found["kernels"], strict=True))


@pytest.fixture(scope="module")
def kernels(on_hopper, entries) -> dict[str, dict]:
    return counted(on_hopper, entries, [GPUS[name] for name in ("H100", "H200", "B200")])


def test_the_cost_of_attention_and_templates_is_that_of_the_code_that_the_gpu_runs(kernels, entries):
    hopper, blackwell = GPUS["H200"], GPUS["B200"]
    for gpu, rate in ((hopper, 2048), (blackwell, 4096)):
        cycles = gpu.multiprocessors * rate * gpu.clock
        assert kernels[TEMPLATE]["seconds"][gpu.name]["tensor"] == pytest.approx(ROWS * OUTPUTS * WIDTH / cycles)
        # Each of the two groups of warps multiplies all queries by the keys, and one half of the values by weights.
        multiply_adds = ROWS * (WIDTH // 512) * TOKENS * (2 + 1) * 512
        assert kernels[ATTENTION]["seconds"][gpu.name]["tensor"] == pytest.approx(multiply_adds / cycles)
    # Of 2,048 rows of all heads a program takes 64, at once with wgmma and 32 at a time without.
    assert entries[ATTENTION]["grid"] == (ROWS * (WIDTH // 512) // 64, 1, 1) and entries[ATTENTION]["threads"] == 256
    times = kernels[ATTENTION]["seconds"]
    own, plain = (times[gpu.name]["issue"] * gpu.multiprocessors * gpu.clock for gpu in (hopper, blackwell))
    assert own < 0.65 * plain


def test_the_cost_is_that_of_the_code_that_the_gpu_runs(on_hopper, kernels, entries, fatbin):
    gpus, kernel = [GPUS[name] for name in ("H100", "H200", "B200")], kernels[INT4]
    flops = ROWS * 256 * WIDTH
    for gpu, rate in ((gpus[0], 2048), (gpus[1], 2048), (gpus[2], 4096)):
        assert kernel["seconds"][gpu.name]["tensor"] == pytest.approx(flops / (gpu.multiprocessors * rate * gpu.clock))
    assert kernel["loop"]["warp_group"] and kernel["registers"] == read_codes([fatbin], (9, 0))[fatbin].registers
    alone = counted(on_hopper, {INT4: entries[INT4]}, gpus[2:])[INT4]
    assert alone["seconds"]["B200"] == kernel["seconds"]["B200"] and not alone["loop"]["warp_group"]
    # Without wgmma, Hopper's tensor cores are slower.
    plain = bounds.Issued(0, 0, 1e9, False)
    entry = {"weight_bytes": 0, "shared_bytes": 0, "threads": 128, "kernel": ""}
    slow, fast = (
        bounds._seconds(entry, 0, [], 1, 8, issued, 0, 0, gpus[1])["tensor"]
        for issued in (plain, plain._replace(warp_group=True))
    )
    assert fast / slow == pytest.approx(0.63)


def own_ptx(fatbin: bytes) -> str:
    """Return the PTX of the second image, which is in Triton's cache alone, beside its machine code."""
    cubins = (Path(cache_dir()) / "triton-own").glob("*/*.cubin")
    return next(cubin.with_suffix(".ptx").read_text() for cubin in cubins if cubin.read_bytes() in fatbin)


def test_the_barriers_of_both_images_are_checked(fatbin):
    sources = [*read_usages([fatbin])[fatbin].ptx, own_ptx(fatbin)]
    assert [re.search(r"\.target (\w+)", ptx)[1] for ptx in sources] == ["sm_90", "sm_90a"]
    for ptx in sources:
        assert faults(ptx) == []
    missing = sources[1].replace("bar.sync", "// bar.sync")
    assert missing != sources[1] and faults(missing)


def named(name: str) -> SimpleNamespace:
    return SimpleNamespace(__name__=name)


def test_kernels_of_many_rows_and_templates_for_sm_90_alone_get_a_second_image():
    many, few, other = (
        SimpleNamespace(triton_meta={"constants": found}, heuristic_type=HeuristicType.USER_AUTOTUNE, fn=named("k"))
        for found in ({"ROWS": 128, "PLAIN_ROWS": 64}, {"ROWS": 64, "PLAIN_ROWS": 0}, {"BLOCK_M": 64})
    )
    template = SimpleNamespace(triton_meta={"constants": {}}, heuristic_type=HeuristicType.TEMPLATE, fn=named("k"))
    on_hopper = SecondImages([BY_ARCH["sm_90"]], None)
    assert on_hopper.wanted(many) and on_hopper.wanted(template)
    assert not on_hopper.wanted(few) and not on_hopper.wanted(other)
    for arch in BY_ARCH.keys() - {"sm_90"}:
        assert not any(SecondImages([BY_ARCH[arch]], None).wanted(each) for each in (many, template))


def test_the_plain_image_takes_64_rows_at_a_time_and_the_second_one_all():
    given = Config({"STAGES": 4}, num_warps=4, maxnreg=168)

    def plain(kernel: str) -> list[Config]:
        meta = {"constants": {"ROWS": 128, "PLAIN_ROWS": 64}}
        return plain_configs(SimpleNamespace(configs=[given], triton_meta=meta, fn=named(kernel)))

    (int4,) = plain("_int4_matmul_kernel")
    assert int4.kwargs == {"STAGES": 4, "ROWS": 64} and int4.maxnreg == 168 and given.kwargs == {"STAGES": 4}
    own = own_config(given)
    assert own.kwargs == {"STAGES": 4} and own.maxnreg is None and own.num_warps == 4
    of_attention = {(each.kwargs["BLOCK_N"], each.num_stages, each.num_warps) for each in plain(ATTENTION)}
    assert of_attention == {*attention_chunk.CONFIGS}
    assert {each.kwargs["ROWS"] for each in plain(ATTENTION)} == {64}


PTX = ".visible .entry k(\n\t.param .u64 .ptr .global .align 1 k_param_0,\n\t.param .u32 k_param_1\n)\nwgmma.mma_async"
METADATA = {
    "name": "k", "num_warps": 4, "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1,
    "profile_scratch_size": 0, "shared": 40_000,
}  # fmt: skip


class Metadata(SimpleNamespace):
    def _replace(self, **values):
        return Metadata(**vars(self) | values)


def kernel(ptx: str = PTX, cubin: bytes = b"", **metadata) -> SimpleNamespace:
    return SimpleNamespace(metadata=Metadata(**METADATA | metadata), asm={"ptx": ptx, "cubin": cubin})


def test_two_images_that_one_host_cannot_launch_are_refused():
    check_one_host(kernel(), kernel(shared=80_000, num_warps=8))
    for field, other in (("name", "l"), ("num_ctas", 2), ("global_scratch_size", 128)):
        with pytest.raises(ValueError, match=f"k: {field} is .*, and {other} in the code for sm_90a"):
            check_one_host(kernel(), kernel(**{field: other}))
    for ptx in (PTX.replace("u32", "u64"), PTX.replace(",\n\t.param .u32 k_param_1", "")):
        with pytest.raises(ValueError, match="k: the parameters are"):
            check_one_host(kernel(), kernel(ptx))


def compiled(own: SimpleNamespace | None, monkeypatch, spills: int = 0, name: str = "k") -> OwnImage | None:
    """Compile ``own`` beside a plain kernel. Of None Triton says that it does not fit."""
    monkeypatch.setattr(second_image, "usage", lambda cubin: (255, spills))

    def compile_one(_config: Config) -> SimpleNamespace:
        assert autotuner.device_props.cc == 90
        if own is None:
            raise OutOfResources(240_000, BY_ARCH["sm_90"].shared_memory_per_block, "shared memory")
        return SimpleNamespace(kernel=own)

    given = DeviceProperties("cuda", 0, 108, 80)
    autotuner = SimpleNamespace(_precompile_config=compile_one, fn=named(name), device_props=given)
    images = SecondImages([BY_ARCH["sm_80"], BY_ARCH["sm_90"]], nullcontext)
    found = images.compiled(autotuner, SimpleNamespace(kernel=kernel(cubin=b"plain")), Config({}))
    assert autotuner.device_props is given
    return found


def test_an_image_without_wgmma_with_spills_or_that_does_not_fit_is_left_out(monkeypatch):
    image = compiled(kernel(shared=80_000, num_warps=8, cubin=b"own"), monkeypatch)
    assert image == OwnImage(b"own", 8, 80_000)
    without = kernel(PTX.replace("wgmma", "mma"), shared=80_000)
    for own, spills in ((without, 0), (kernel(shared=80_000), 8), (kernel(shared=240_000), 0), (None, 0)):
        assert compiled(own, monkeypatch, spills) is None


def test_a_kernel_may_offer_an_image_from_another_source(monkeypatch):
    offered = OwnImage(b"of nvcc", 12, 190_000)
    monkeypatch.setitem(second_image.OFFERED, "other", lambda _autotuner, plain: offered if plain.asm["ptx"] else None)
    assert compiled(None, monkeypatch, name="other") == offered
    monkeypatch.setitem(second_image.OFFERED, "other", lambda *_: offered._replace(shared=240_000))
    assert compiled(None, monkeypatch, name="other") is None
    few = SimpleNamespace(triton_meta={"constants": {}}, heuristic_type=HeuristicType.USER_AUTOTUNE, fn=named("other"))
    assert SecondImages([BY_ARCH["sm_90"]], None).wanted(few)


def test_the_images_are_packed_with_their_kernel_alone(monkeypatch, tmp_path):
    found, late = Fatbins(), Future()
    found.keep(b"plain", [Packed("elf", "90a", b"own"), Packed("elf", "120", late), Packed("ptx", "120", b"text")])
    late.set_result(b"late")
    ran = []
    monkeypatch.setattr(fatbins_of_a_list.subprocess, "run", lambda command, **_: ran.append(command))
    for name in ("plain", "other"):
        (tmp_path / name).write_bytes(name.encode())
        command = ["fatbinary", "--create=x", f"--image3=kind=elf,sm=90,file={tmp_path / name}"]
        found.run(command, check=True)
        assert ran[-1][:3] == command
        more = [word.partition("file=") for word in ran[-1][3:]]
        if name == "plain":
            kinds = ("elf,sm=90a", "elf,sm=120", "ptx,sm=120")
            assert [start for start, _, _ in more] == [f"--image3=kind={kind}," for kind in kinds]
            assert [Path(file).read_bytes() for _, _, file in more] == [b"own", b"late", b"text"]
        else:
            assert more == []
    found.run(["ld", "-o", "x"])
    assert ran[-1] == ["ld", "-o", "x"]
    with pytest.raises(ValueError, match="nvcc makes a fatbin with one image"):
        found.run(["nvcc", "-fatbin", "k.ptx"])


def test_the_driver_takes_the_image_of_the_gpu_first():
    both = ["sm_90", "sm_90a"]
    assert preferred(both, (9, 0)) == preferred(both[::-1], (9, 0)) == "sm_90a"
    assert {preferred(both, capability) for capability in ((8, 9), (10, 0), (12, 0), None)} == {"sm_90"}
    assert preferred(["sm_80", "sm_86"], (8, 9)) == "sm_86" and preferred(["sm_80", "sm_86"], (8, 0)) == "sm_80"
