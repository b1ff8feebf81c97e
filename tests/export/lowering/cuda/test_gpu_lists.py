"""One library for several GPUs: which image each takes, how it is launched there, and what is refused. And the same
library for another host."""

import hashlib
import platform
import re
import shutil
import struct
import subprocess

import pytest
import torch
from cuda_lowered import lowered
from kernel_inputs import Int4Linear, activations
from machine_code.sass import read_codes_for
from stand_in_driver import SOURCES
from torch.export import Dim

from eagle3.export.lowering.cuda.inductor.card_launches import CardLaunch, Image, launches_by_card, taken
from eagle3.export.lowering.cuda.inductor.early_launches import can_start_early
from eagle3.export.lowering.cuda.inductor.hosts import compiled_for
from eagle3.export.lowering.cuda.kernels import sums
from eagle3.export.lowering.cuda.kernels.attention import attention
from eagle3.export.lowering.cuda.named_gpu.fatbins import common_gpu, with_own_images
from eagle3.export.patching.patches import environment
from eagle3.runner.artifact.cuda_library import fatbin_entries, read_library
from eagle3.runner.artifact.gpu_needs import weight_tables
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.hosts.torch_host_checks import check_architectures
from eagle3.runner.system.gpus import ALL, BY_ARCH, archs_of, excesses, gpus_of, launches_on

OTHER = "aarch64"
CROSS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
NAMED = "sm_80,sm_86,sm_87,sm_90,sm_120"
ROWS, WIDTH, HEAD, SLOTS = 96, 1024, 256, 512


class Layer(torch.nn.Module):
    """An INT4 linear and attention of a prefill, with heads for which the A100 has a larger configuration."""

    def __init__(self):
        super().__init__()
        self.int4 = Int4Linear(36864, WIDTH)  # 288 tiles: more than an H100 runs at a time
        self.register_buffer("cache", torch.zeros(1, 1, SLOTS, HEAD).bfloat16())

    def forward(self, x, last):
        given = torch.zeros_like(last), last, self.int4.arrived, 0.1, SLOTS, 0
        return self.int4(x) + 1, attention(x.view(1, x.shape[0], -1, HEAD), self.cache, self.cache, *given)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A layer lowered for ``NAMED``. ``graph.cross`` has its library for aarch64, which this machine's own compiler
    makes where there is no cross compiler."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: nothing is substituted")
    rows = {0: Dim("rows", min=17, max=128)}
    compiler = {} if shutil.which(CROSS[0]) else {f"CXX_{OTHER}": "g++"}
    with (
        sums.made_for_named(NAMED),
        environment(compiler),
        compiled_for([OTHER], tmp_path_factory.mktemp("host")) as cross,
    ):
        _, graph = lowered(
            Layer(), (activations(ROWS, WIDTH), torch.arange(ROWS)), rows=ROWS, arch=NAMED, library=True,
            dynamic_shapes=(rows, rows),
        )  # fmt: skip
    graph.cross = cross
    return graph


@pytest.fixture(scope="module")
def made(graph):
    """The recorded launches of the layer, its library, and the C++ that launches its kernels."""
    return graph.launches, read_library(graph.library), graph.wrappers


@pytest.fixture(scope="module")
def on_other(graph):
    """The bytes of the layer's library for the other host."""
    (file,) = graph.cross.folder.glob(f"*.{OTHER}")
    assert file.stem == hashlib.sha256(graph.library).hexdigest()
    return file.read_bytes()


def test_each_gpu_has_machine_code_and_later_ones_ptx(made):
    launches, library, _ = made
    wgmma = ("_int4_matmul_kernel", "_attention_chunk_kernel")
    for name, fatbin in library.kernels.items():
        images = list(fatbin_entries(fatbin))
        own = "sm_90a" if name.startswith(wgmma) else "sm_90"
        assert {arch for form, arch in images if form == "sass"} == {"sm_80", "sm_86", "sm_87", own, "sm_120"}
        assert {arch for form, arch in images if form == "ptx"} in ({"sm_80"}, {"sm_80", "sm_120"})
        check_architectures({"prefill": library}, (8, 9), NAMED)
        check_architectures({"prefill": library}, (13, 0), NAMED)
    assert {entry["kernel"] for entry in launches} < library.kernels.keys()  # one is for few rows


def test_every_gpu_has_a_launch_with_warps_and_shared_memory_that_fit_it(made):
    launches, library, wrappers = made
    codes = read_codes_for(library.kernels.values(), [BY_ARCH[arch].capability for arch in archs_of(NAMED)])
    for arch in archs_of(NAMED):
        own = launches_on({"prefill": launches}, BY_ARCH[arch].arch)
        assert list(excesses(own, arch, BY_ARCH[arch].shared_memory_per_block)) == []
        for entry in own["prefill"]:
            code = codes[library.kernels[entry["kernel"]]][BY_ARCH[arch].capability]
            assert code.spill_bytes == 0 and code.registers * entry["threads"] <= 65536
    (attends,) = (entry for entry in launches if entry["kernel"].startswith("_attention_chunk"))
    shared = {arch: launches_on({"": [attends]}, BY_ARCH[arch].arch)[""][0]["shared_bytes"] for arch in archs_of(NAMED)}
    assert shared["sm_86"] == shared["sm_120"] <= 99 << 10 < shared["sm_90"]
    for entry in launches:
        table = ", ".join(
            f"{{{card['first']}, {card['threads'] // 32}, {card['shared_bytes']}, {card['parts']}, {card['whole']}}}"
            for card in entry.get("cards", ())
        )
        assert (f"cards_[] = {{{table}}};" in wrappers) == bool(table)
    # 576 tiles of few rows: an H100 runs 528 whole ones, 264 at a time, then four programs of each other one
    (few,) = re.findall(r"cards_\[\] = (\{\{80, 8, \d+, 1, 0\}.*\});", wrappers)
    assert re.search(r"\{90, 8, \d+, 4, 528\}, \{100, 8, \d+, 1, 0\}$", few[:-1])
    (name,) = (name for name in library.kernels if name.startswith("int4_small_m"))
    registers = {capability: code.registers for capability, code in codes[library.kernels[name]].items()}
    assert registers[9, 0] <= 128  # for two programs on a multiprocessor


def test_a_gpu_that_no_image_serves_is_refused_with_those_that_are_served(made):
    _, library, _ = made
    words = rf"the GPU is sm_75, kernel .*the artifact serves {', '.join(BY_ARCH)}.: .*--cuda-arch sm_75"
    with pytest.raises(ValueError, match=words):
        check_architectures({"prefill": library}, (7, 5), NAMED)
    name, fatbin = next(iter(library.kernels.items()))
    broken = library.kernels | {name: without(fatbin, {"ptx"}, {"sm_87"})}
    with pytest.raises(ValueError, match=rf"sm_87, kernel {name} of prefill .*serves sm_80, sm_86, sm_89"):
        check_architectures({"prefill": library.__class__(broken, [])}, (8, 7), NAMED)
    check_architectures({"prefill": library.__class__(broken, [])}, (8, 9), NAMED)


def without(fatbin: bytes, forms: set[str], archs: set[str]) -> bytes:
    """Return a fatbin without the images of these forms, and of these architectures."""
    (header,) = struct.unpack_from("<H", fatbin, 6)
    at, kept = header, b""
    for form, arch in fatbin_entries(fatbin):
        length, payload = struct.unpack_from("<IQ", fatbin, at + 4)
        if form not in forms and arch not in archs:
            kept += fatbin[at : at + length + payload]
        at += length + payload
    return fatbin[:8] + struct.pack("<Q", len(kept)) + fatbin[16:header] + kept


SASS = [Image("sass", "sm_80", 4, 100), Image("sass", "sm_86", 4, 50), Image("sass", "sm_90", 8, 200)]
PTX = Image("ptx", "sm_80", 4, 100)


def test_the_table_has_the_launch_of_the_image_that_the_driver_takes():
    own = Image("sass", "sm_90a", 8, 300)
    found = launches_by_card([*SASS, PTX, own])
    # Tegra runs no desktop's code; after 9.0 and its own PTX comes that of sm_80
    assert [each[:3] for each in found] == [
        (80, 4, 100), (86, 4, 50), (87, 4, 100), (88, 4, 50), (90, 8, 300), (91, 8, 200), (100, 4, 100),
    ]  # fmt: skip
    assert launches_by_card(SASS)[-1] == CardLaunch(100, 0, 0)  # without PTX no later GPU runs
    assert taken([*SASS, PTX], 75) is None and taken([*SASS, PTX], 103) == PTX
    assert launches_by_card([PTX, Image("sass", "sm_80", 4, 100)]) == (CardLaunch(80, 4, 100),)


def test_one_image_serves_gpus_of_one_family_with_equal_limits():
    own = [f"sm_{gpu.arch}" for gpu in with_own_images(list(BY_ARCH.values()), {})]
    assert own == ["sm_80", "sm_86", "sm_87", "sm_90", "sm_100", "sm_110", "sm_120"]
    two = [BY_ARCH["sm_120"], BY_ARCH["sm_121"]]
    assert with_own_images(two, {two[0]: 3, two[1]: 3}) == two[:1]
    assert with_own_images(two, {two[0]: 3, two[1]: 2}) == two
    one = common_gpu(list(BY_ARCH.values()))
    assert (one.arch, one.shared_memory_per_block, one.multiprocessors) == (80, 99 << 10, 170)
    assert common_gpu([BY_ARCH["sm_90"]]) is BY_ARCH["sm_90"]


def test_a_list_is_ordered_and_all_are_known():
    assert archs_of("sm_120,sm_80,sm_100,sm_80") == ["sm_80", "sm_100", "sm_120"]
    assert archs_of(ALL) == list(BY_ARCH) == archs_of(",".join(BY_ARCH))
    assert [gpu.name for gpu in gpus_of("sm_121,sm_90")] == ["H100", "H200", "GB10"]
    assert can_start_early("sm_90,sm_121") and not can_start_early("sm_87,sm_90")


@pytest.mark.parametrize(("outputs", "blocks"), [(5376, 84), (43008, 21), (256, 2)])
def test_each_gpu_of_a_list_divides_a_matmul_as_if_it_were_alone(outputs, blocks):
    """There is memory and a grid for the most parts; the kernel for each GPU has its own."""
    with sums.made_for_named(ALL):
        assert sums.multiprocessors() == 170 and sums.has_wgmma()
        whole, most = sums.division(outputs, blocks, 128)
    constants = {"N": outputs, "K": blocks * 256 - 8, "BLOCK_N": 128, "BLOCK_K": 256, "WHOLE": whole, "SPLITS": most}
    own = {}
    for arch, gpu in BY_ARCH.items():
        with sums.made_for(gpu.multiprocessors, arch in sums.WHOLE_TILES_ON):
            own[arch] = sums.division(outputs, blocks, 128)
    assert {arch: sums.own_division(arch, constants) for arch in BY_ARCH} == own
    assert whole == 0 and max(each.parts for each in own.values()) == most
    assert (own["sm_90"].whole > 0) == (outputs == 43008)
    halves = sums.own_division("sm_90", constants | {"BLOCK_N": 64})  # two programs for each tile
    assert halves == (2 * own["sm_90"].whole, own["sm_90"].parts)
    for other in ({"SPLITS": 0}, {"WHOLE": 8}, {"N": 2 * outputs}, {"K": 256}):
        assert sums.own_division("sm_80", constants | other) is None
    with sums.made_for_named("sm_80,sm_100"):
        assert not sums.has_wgmma() and sums.division(2 * 21504, 21, 128).whole == 0


def test_even_shares_fill_the_gpu_with_which_all_lose_the_least():
    with sums.made_for_named("sm_90"):
        assert sums.even_programs(3, "") == 3 * 132
    sums.GIVEN_UP.clear()
    with sums.made_for_named("sm_80,sm_90"):
        assert sums.even_programs(3, "5 x 7") == 3 * 108
    assert sums.GIVEN_UP == {"even shares of 5 x 7": {"sm_90": 0.2222}}


def test_a_library_for_another_host_has_the_same_kernels(made, on_other):
    library, other = made[1], read_library(on_other)
    assert other.kernels == library.kernels and other.needs == library.needs
    assert other.machine == (OTHER if shutil.which(CROSS[0]) else platform.machine())


def test_a_program_for_another_host_differs_in_its_library_alone(graph, on_other, tmp_path):
    program = graph.edge.to_executorch()
    file = tmp_path / "model.pte"
    file.write_bytes(bytes(graph.cross.program(program, OTHER)))
    found = read_pte(file)
    ((other,),) = weight_tables(found).values()
    assert found.named(other.library_key) == on_other
    assert other.library_key == f"{hashlib.sha256(on_other).hexdigest()}_so_blob"
    file.write_bytes(program.buffer)
    ((own,),) = weight_tables(read_pte(file)).values()
    assert other.weights == own.weights and other.library_key != own.library_key


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads code for x86_64")
def test_a_library_runs_on_every_processor_of_its_kind(graph, tmp_path):
    """Code for this machine's own processor would have registers that others lack."""
    file = tmp_path / "library.so"
    file.write_bytes(graph.library)
    code = subprocess.run(["objdump", "-d", file], capture_output=True, text=True, check=True).stdout
    assert "%xmm0" in code and not re.search(r"%[yz]mm|\tv[a-z]+[a-z0-9]* .*%xmm|%k[0-7]", code)


@pytest.mark.skipif(not all(map(shutil.which, CROSS[:2])), reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_the_other_hosts_library_loads_in_an_emulator_and_says_the_same(graph, on_other, tmp_path):
    compiler, *emulator = CROSS
    kernels = sorted(read_library(on_other).kernels)
    said = []
    for name, compile_with, run, library in (
        ("own", "g++", [], graph.library),
        ("other", compiler, emulator, on_other),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "library.so").write_bytes(library)
        command = [compile_with, "-std=c++20", "-O1"]
        driver = [*command, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
        subprocess.run([*driver, SOURCES / "driver.cpp"], check=True)
        subprocess.run([*command, "-rdynamic", "-o", folder / "loads", SOURCES / "loads_library.cpp"], check=True)
        device = BY_ARCH["sm_87"]
        given = [folder / "libcuda.so.1", folder / "library.so", str(device.arch), str(device.shared_memory_per_block)]
        printed = subprocess.run([*run, folder / "loads", *given, *kernels], capture_output=True, text=True)
        assert printed.returncode == 0, printed.stderr
        said.append(printed.stdout.splitlines())
    assert said[0] == said[1] and said[0][-len(kernels) :] == kernels and "NumInputs 2" in said[0]
