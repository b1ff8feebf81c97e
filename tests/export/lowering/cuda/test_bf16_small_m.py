"""The bfloat16 small-M kernel, run by Triton's interpreter; its compiled code, without a GPU; and the end of every
product whose K several programs share."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_usage import SHARED, Usage, usage
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder
from triton_interpreter import asked_of_l2, interpreted, loaded_before_waits

from eagle3.export.lowering.cuda.kernels import bf16, sums
from eagle3.runner.system.gpus import BY_ARCH

REQUEST = "cp.async.bulk.prefetch.L2"


def product(x: Tensor, weight: Tensor, arrived: Tensor | None = None, count: int | None = None) -> Tensor:
    arrived = sums.counters() if arrived is None else arrived
    with interpreted(sums, bf16):
        choice = replace(bf16.BF16, parts=count)
        return bf16._launch_bf16(bf16._bf16_small_m_kernel, x, weight, arrived, choice=choice)


def made(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()


def assert_right(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Assert that the product is right up to rounding to bf16 and the errors of float32."""
    expected = x.double() @ weight.double().T
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    room = 1e-6 * x.double().abs() @ weight.double().abs().T + 2**-8 * expected.abs()
    assert ((found.double() - expected).abs() <= room).all()


@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 32, 33, 70])
def test_the_bfloat16_product_is_right_for_every_number_of_rows(m):
    x, weight = made(m, 80, 512)
    assert_right(product(x, weight), x, weight)


@pytest.mark.parametrize(("n", "k"), [(1, 8), (7, 256), (63, 200), (64, 128), (65, 136), (129, 392)])
def test_the_bfloat16_product_is_right_for_any_outputs_and_any_k(n, k):
    x, weight = made(3, n, k)
    assert_right(product(x, weight), x, weight)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_split_of_k_is_right_and_leaves_the_counters_unchanged(count):
    arrived = sums.counters()
    for m in (3, 20):
        x, weight = made(m, 70, 1280)
        for _ in range(2):  # the second call finds what the first one left
            assert_right(product(x, weight, arrived, count=count), x, weight)
            assert not arrived.any()


def test_a_row_of_the_bfloat16_product_has_the_same_bits_in_every_call():
    # Eighths up to 4: sums within a block of a product are exact, so that numpy's order of them says nothing.
    weight = torch.randn(40, 1024).bfloat16()
    x = torch.randint(-32, 33, (35, 1024)).bfloat16() / 8
    alone = torch.cat([product(row[None], weight, count=2) for row in x])
    for m in (2, 8, 9, 16, 17, 33, 35):
        assert torch.equal(product(x[:m], weight, count=2), alone[:m]), f"{m} rows"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sums_do_not_depend_on_which_program_arrives_last(order, monkeypatch):
    x, weight = torch.zeros(3, 1280).bfloat16(), torch.ones(70, 1280).bfloat16()
    for k, value in ((0, 2**26), (500, 1), (1000, -(2**26))):  # of three programs: 0 in the order of K, else 1
        x[:, k] = value
    numbered, asked = InterpreterBuilder.create_get_program_id, []

    def renumbered(self, axis):
        handle = numbered(self, axis)
        if axis == 2:
            asked.append(order[int(handle.data[0])])
            handle.data = np.array([asked[-1]], dtype=np.int32)
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", renumbered)
    assert not product(x, weight, count=3).any()
    assert tuple(dict.fromkeys(asked)) == order


@pytest.mark.races(("forward",))  # loads are counted
def test_each_weight_is_read_once_for_up_to_16_rows(monkeypatch):
    x, weight = made(16, 128, 1024)
    read = []
    load = InterpreterBuilder.create_masked_load

    def counted(self, ptrs, mask, *options):
        here = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].ravel()
        read.append(here[(here >= weight.data_ptr()) & (here < weight.data_ptr() + weight.nbytes)])
        return load(self, ptrs, mask, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    for m in (1, 8, 16):
        read.clear()
        product(x[:m], weight, count=2)
        addresses = np.concatenate(read)
        assert len(addresses) == len(np.unique(addresses)) == weight.numel()


def test_a_call_launches_a_single_size_of_row_tiles():
    for sizes in ((8, 16), (16, 32), (8, 16, 32)):
        for m in range(1, 100):
            tiles = {size: count for size, count in sums.row_tiles(m, sizes) if count}
            size = next((size for size in sizes if m <= size), sizes[-1])
            assert tiles == {size: -(-m // size)}


def test_row_tile_sizes_that_no_call_uses_are_left_out_of_a_trace():
    from torch.export import Dim, export

    class Sizes(torch.nn.Module):
        def forward(self, x):
            self.found = [size for size, _ in sums.row_tiles(x.shape[0], (8, 16))]
            return x + 1

    for least, most, expected in ((2, 8, [8]), (2, 9, [8, 16]), (9, 40, [16]), (1, 40, [8, 16])):
        model = Sizes()
        export(model, (torch.zeros(most - 1, 2),), dynamic_shapes=({0: Dim("rows", min=least, max=most)},))
        assert model.found == expected


def test_bad_arguments_of_the_bfloat16_kernel_are_named():
    x, weight = made(3, 8, 64)
    with pytest.raises(ValueError, match="x has K = 56, the weight 64"):
        bf16.bf16_small_m(x[:, :56], weight, sums.counters())
    with pytest.raises(ValueError, match=r"strides \(1, 8\): not contiguous"):
        product(x, weight.T.contiguous().T)
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        product(x.float(), weight)
    with pytest.raises(ValueError, match="40000 rows of 5376 outputs: the kernel takes 24960 rows"):
        sums.launch(
            torch.empty(40000, 8).bfloat16(),
            5376,
            64,
            84,
            sums.Division(0, 2),
            (16, 32),
            sums.counters(),
            lambda *_: None,
        )


def compiled(arch: int, rows: int, folder: Path, **asked: object) -> Usage:
    constants = {"N": 5376, "K": 21504, "WHOLE": 0, "SPLITS": 3, "BLOCK_N": bf16.BF16.n, "BLOCK_K": bf16.BLOCK_K}
    constants |= {"BLOCK_M": rows, "STAGES": bf16.STAGES[rows], "ACTIVATION": ""} | (asked or bf16.ASKS_NOTHING)
    types = ["*bf16", "*bf16", "*i32", "*fp32", "*bf16", "i32"] + ["*u8"] * bool(asked)
    return usage(bf16._bf16_small_m_kernel, types, constants, arch, folder, bf16.WARPS)


@pytest.mark.first(1)
@pytest.mark.parametrize(("arch", "rows"), [(80, 16), (89, 16), (90, 16), (90, 32), (100, 16), (120, 16)])
def test_the_bfloat16_kernel_stays_within_its_gpu_resources(arch, rows, tmp_path):
    found = compiled(arch, rows, tmp_path)
    assert found.shared <= SHARED and found.registers <= 128 and found.stack == 0
    assert found.loop.count("HMMA") == rows and found.ptx.count("cp.async.cg.shared.global") > 0
    assert "atom.global.gpu.acq_rel.add" in found.ptx
    if rows == 16:
        assert found.a_weight(bf16.BF16.n * bf16.BLOCK_K, bf16.WARPS) < 1.5


@pytest.mark.first(1)
@pytest.mark.parametrize(("arch", "rows"), [(90, 16), (90, 32), (100, 16), (120, 16)])
def test_requests_to_l2_change_neither_the_loop_nor_the_programs_on_a_gpu(arch, rows, tmp_path):
    """A program asks for its first blocks before the wait and loads nothing there; after its loop it asks for the next
    weight."""
    plain = compiled(arch, rows, tmp_path)
    found = compiled(arch, rows, tmp_path, FIRST=bf16.STAGES[rows] - 1, OF_NEXT=83216, EARLY=True)
    gpu = BY_ARCH[f"sm_{arch}"]
    programs = [gpu.resident(each.registers, each.shared, 32 * bf16.WARPS) for each in (plain, found)]
    assert programs[0] == programs[1] and found.registers <= plain.registers + 4 and found.stack == 0
    assert len(found.loop) <= 1.03 * len(plain.loop) and found.loop.count("BAR") == plain.loop.count("BAR")
    before, after = found.ptx.split("griddepcontrol.wait;")
    assert "griddepcontrol.launch_dependents" in before
    assert before.count(REQUEST) == after.count(REQUEST) == 1
    assert not any(each in before for each in ("ld.global", "cp.async.cg", "st.global", "atom."))
    assert after.rindex("mma.sync") < after.index(REQUEST) < after.index("atom.")
    assert REQUEST not in plain.ptx and "griddepcontrol" not in plain.ptx


def test_an_early_launch_of_the_bfloat16_kernel_loads_nothing_before_its_wait():
    x, weight = made(3, 130, 512)
    with loaded_before_waits() as loaded, asked_of_l2() as asked, interpreted(sums, bf16):
        choice = replace(bf16.BF16, parts=2)
        given = x, weight, sums.counters(), "", choice
        found = bf16._launch_bf16(bf16._bf16_small_m_kernel, *given, following=weight, early=True)
    assert asked and not loaded
    assert torch.equal(found, product(x, weight, count=2))
