"""Times the small-M kernels (export/lowering/cuda/kernels) on a CUDA GPU, on the linears of Gemma 4 31B.

    python scripts/gpu/bench_small_m.py                            # checks, then every linear at 1 to 16 rows: minutes
    python scripts/gpu/bench_small_m.py --linear down --sweep      # other block sizes on one linear
    python scripts/gpu/bench_small_m.py --json small_m.json

Without a CUDA GPU it prints that, runs nothing and exits with 0. It needs torch, triton and click, and ExecuTorch only
for the time of its dequantization. On an H200, `down` reaches 53% of a copy's bandwidth at 8 rows, which misses the
goal, in 1.13 times the time of 1 row.
"""

import functools
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import bf16, k_quants, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4

LINEARS = {  # N, K; INT4 unless the name says another type
    "sliding_q": (8192, 5376),
    "sliding_kv": (4096, 5376),
    "sliding_o": (5376, 8192),
    "full_q": (16384, 5376),
    "full_k": (2048, 5376),
    "full_o": (5376, 16384),
    "sliding_qkv": (16384, 5376),
    "gate_up": (43008, 5376),
    "down": (5376, 21504),
    "lm_head": (262144, 5376),
    "lm_head_int8": (262144, 5376),
    "down_int8": (5376, 21504),
    "down_q4_k": (5376, 21504),
    "down_q5_k": (5376, 21504),
    "down_q6_k": (5376, 21504),
    "sliding_kv_q6_k": (4096, 5376),
    "lm_head_q6_k": (262144, 5376),
    "fc_bf16": (5376, 16128),
    "draft_gate_up_bf16": (43008, 5376),
    "draft_down_bf16": (5376, 21504),
}
Weight = tuple[Tensor | None, ...]
"""The arguments of a small-M op between x and its counters: 3 for INT4 and INT8, 4 for a K-quant, 1 for bfloat16."""
GOAL_LINEAR = "down"
GOAL_SHARE, GOAL_GROWTH = 0.70, 1.25
INT4_PLAIN_MM = {1: 0.102, 2: 0.127, 3: 0.159, 4: 0.196}
"""Milliseconds on an A100, quoted from pytorch/executorch PR 21456 and not measured here."""
WARM_UP_SECONDS = 1.0
"""The seconds of warm-up, because an idle GPU starts at a fraction of its clock."""
CYCLED = 512 << 20  # bytes of weights that calls use in turn, more than any L2 holds


@dataclass
class Timing:
    """The times of one linear in microseconds by rows, and their shares of copy bandwidth."""

    linear: str
    n: int
    k: int
    division: sums.Division
    weight_bytes: int
    us: dict[int, float] = field(default_factory=dict)
    copy_share: dict[int, float] = field(default_factory=dict)
    dequantize_us: float | None = None

    @property
    def growth(self) -> float:
        return self.us[8] / self.us[1]


def int4_weight(n: int, k: int) -> Weight:
    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    def steps(largest: float) -> Tensor:
        return (torch.rand(n, k // 256, device="cuda") * largest / 255).half()

    return codes(n, k // 2), *int4.tiled(codes(n, k // 32), steps(0.1), codes(n, k // 32), steps(15))


def int8_weight(n: int, k: int) -> Weight:
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    return q, torch.rand(n, 1, device="cuda").bfloat16() / 100, torch.zeros(n, 1, dtype=torch.int8, device="cuda")


def k_quant_weight(bits: int, n: int, k: int) -> Weight:
    tiles, blocks = -(-n // int4.TILE), k // int4.BLOCK

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    high = None if bits == 4 else codes(n // k_quants.OF_WORD[bits], k // 2)
    scales = codes(tiles, blocks, 8, int4.TILE, 2)
    steps = (torch.rand(tiles, blocks, int4.TILE, 1 if bits == 6 else 2, device="cuda") / 1000).half()
    return codes(n, k // 2), high, scales.view(torch.int8) if bits == 6 else scales, steps


def made(name: str) -> Weight:
    """Return a random weight for an entry of ``LINEARS``."""
    n, k = LINEARS[name]
    if name.endswith("bf16"):
        return (torch.randn(n, k, device="cuda", dtype=torch.bfloat16),)
    if kind := re.search(r"_q(\d)_k$", name):
        return k_quant_weight(int(kind[1]), n, k)
    return int8_weight(n, k) if name.endswith("int8") else int4_weight(n, k)


def is_int4(weight: Weight) -> bool:
    return len(weight) == 3 and weight[0].dtype == torch.uint8


def choice_of(weight: Weight) -> small_m.Blocks:
    if len(weight) == 1:
        return bf16.BF16
    if len(weight) == 4:
        return k_quants.CHOICES[k_quants.code_bits(*weight)]
    return int4.INT4 if is_int4(weight) else small_m.INT8


def nbytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in weight if tensor is not None)


@functools.cache
def counters() -> Tensor:
    return sums.counters("cuda")


def run(x: Tensor, weight: Weight, choice: small_m.Blocks | None = None) -> Tensor:
    choice = choice or choice_of(weight)
    if len(weight) == 1:
        return bf16._launch_bf16(bf16._bf16_small_m_kernel, x, *weight, counters(), choice=choice)
    if len(weight) == 4:
        return k_quants._launch_k_quant(k_quants._k_quant_small_m_kernel, x, *weight, counters(), choice=choice)
    if is_int4(weight):
        return int4._launch_int4(int4.int4_small_m_kernel, x, [weight[0]], *weight[1:], counters(), choice=choice)
    return small_m._launch_int8(small_m._int8_small_m_kernel, x, *weight, counters(), choice=choice)


def reference(x: Tensor, weight: Weight, outputs: slice) -> Tensor:
    """Compute some tiles of the outputs by the plain PyTorch reference."""

    def part(tensor: Tensor | None, share: int = 1) -> Tensor | None:
        """Return the rows of a tensor that belong to the outputs; a row covers ``share`` outputs."""
        ends = (None if end is None else end // share for end in (outputs.start, outputs.stop))
        return tensor if tensor is None else tensor[slice(*ends)]

    if is_int4(weight):
        return int4.int4_reference(x, [part(weight[0])], *(part(each, int4.TILE) for each in weight[1:]))
    if len(weight) == 4:
        qdata, high, *scales = weight
        high = part(high, k_quants.OF_WORD.get(k_quants.code_bits(*weight), 1))
        return k_quants.k_quant_reference(x, part(qdata), high, *(part(each, int4.TILE) for each in scales))
    of_kind = {1: bf16.bf16_reference, 3: small_m.int8_reference}
    return of_kind[len(weight)](x, *map(part, weight))


def check(name: str, weight: Weight, k: int, choice: small_m.Blocks | None = None) -> None:
    """Check that the first and the last outputs equal the reference, that each row has the same bits in every call, and
    that the counters are zero afterwards."""
    x = torch.randn(17, k, device="cuda").bfloat16()
    found = run(x, weight, choice)
    for some in (slice(0, 1024), slice(-1024, None)):
        expected = reference(x.float(), weight, some)
        error = ((found[:, some].float() - expected).abs().max() / expected.abs().max()).item()
        if not error < 2**-8:
            raise click.ClickException(f"{name}: an error of {error:.2g} of the largest output: the kernel is wrong")
    for m in (*range(1, 17), 17):
        if not torch.equal(run(x[:m], weight, choice), found[:m]):
            raise click.ClickException(f"{name}: the rows of a call of {m} differ from those of a call of 17")
    if counters().any():
        raise click.ClickException(f"{name}: a counter was left at {counters().max()}: sums over K may be lost")


def microseconds(calls: list[Callable[[], object]], repeats: int = 30) -> float:
    """Return the median time of a call. The calls run in turn from a CUDA graph, which leaves out the launch time of
    the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a copy of 1 GiB, and leave the GPU at its full clock.

    The copies are not replayed by a CUDA graph, which would use a copy engine: 2.7 TB/s on an H200 instead of 4.25.
    """
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target, begin = torch.empty_like(source), time.monotonic()
    times = []
    while time.monotonic() < begin + WARM_UP_SECONDS or len(times) < 2:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / 10)
    return 2 * source.numel() / statistics.median(times[len(times) // 2 :])


def copies(weight: Weight) -> list[Weight]:
    count = max(1, -(-CYCLED // nbytes(weight)))
    clones = (tuple(tensor if tensor is None else tensor.clone() for tensor in weight) for _ in range(count - 1))
    return [weight, *clones]


def time_rows(x: Tensor, weights: list[Weight], choice: small_m.Blocks | None = None) -> float:
    return microseconds([lambda weight=weight: run(x, weight, choice) for weight in weights])


def dequantized(x: Tensor, weights: list[Weight]) -> float | None:
    """Return the time of dequantization to bf16 followed by a matmul: ExecuTorch's code for more than 4 rows, or ours
    for K-quants."""
    if len(weights[0]) == 1:
        return microseconds([lambda weight=weight: x @ weight[0].T for weight in weights[:4]])
    if len(weights[0]) == 4:
        linear = torch.compile(lambda x, *weight: x @ k_quants.dequantized(*weight).to(x.dtype).T, dynamic=False)
        return microseconds([lambda weight=weight: linear(x, *weight) for weight in weights[:4]])
    try:
        from executorch.backends.cuda.quantize_op_dispatch.int4_dispatch import _dequant_matmul
        from executorch.backends.cuda.quantize_op_dispatch.int8_dispatch import _unit_dq_mm_int8
    except ImportError:
        return None
    if is_int4(weights[0]):
        weights = [(weight[0], *int4.untiled(*weight[1:], weight[0].shape[0])) for weight in weights[:4]]
        compiled = torch.compile(_dequant_matmul, dynamic=False)
    else:
        compiled = torch.compile(_unit_dq_mm_int8, dynamic=False)
    group = x.shape[1] // weights[0][1].shape[1]
    return microseconds([lambda weight=weight: compiled(x, *weight, group) for weight in weights[:4]])


def division_of(n: int, k: int, weight: Weight) -> sums.Division:
    return choice_of(weight).division(n, -(-k // (bf16.BLOCK_K if len(weight) == 1 else int4.BLOCK)))


def time_linear(name: str, bandwidth: float, dequantizing: bool = True) -> Timing:
    n, k = LINEARS[name]
    weight = made(name)
    size, weights = nbytes(weight), copies(weight)
    with sums.made_for_here():
        check(name, weight, k)
        timing = Timing(name, n, k, division_of(n, k, weight), size)
        for m in range(1, 17):
            x = torch.randn(m, k, device="cuda").bfloat16()
            timing.us[m] = time_rows(x, weights)
            moved = size + 2 * m * (n + k)
            timing.copy_share[m] = moved / (1e-6 * timing.us[m]) / bandwidth
    if dequantizing:
        timing.dequantize_us = dequantized(torch.randn(8, k, device="cuda").bfloat16(), weights)
    return timing


def show(timing: Timing) -> None:
    times = " ".join(f"{timing.us[m]:.1f}" for m in range(1, 17))
    dequantize = f"{timing.dequantize_us:.1f} us" if timing.dequantize_us else "ExecuTorch is not installed"
    click.echo(
        f"{timing.linear}: {timing.n} x {timing.k}, {timing.weight_bytes / 1e6:.1f} MB, "
        f"{timing.division.whole} tiles whole, K of the others in {timing.division.parts}"
    )
    click.echo(f"  us at 1 to 16 rows: {times}")
    click.echo(f"  at 8 rows: {timing.copy_share[8]:.0%} of copy bandwidth, {timing.growth:.2f} x the time of 1 row")
    click.echo(f"  dequantize, then multiply 8 rows: {dequantize}")


def show_goals(timing: Timing) -> None:
    share, growth = timing.copy_share[8], timing.growth
    for goal, met in (
        (f"{timing.linear} at 8 rows: {share:.0%} of copy bandwidth, goal {GOAL_SHARE:.0%}", share >= GOAL_SHARE),
        (f"8 rows in {growth:.2f} x the time of 1, goal {GOAL_GROWTH}", growth <= GOAL_GROWTH),
    ):
        click.echo(f"{'met' if met else 'MISSED'}: {goal}")


def sweep(name: str, bandwidth: float) -> None:
    """Time other choices of ``Blocks`` on one linear, at 1, 8 and 16 rows."""
    n, k = LINEARS[name]
    weight = made(name)
    weights = copies(weight)
    inputs = {m: torch.randn(m, k, device="cuda").bfloat16() for m in (1, 8, 16)}
    click.echo(f"{name}: outputs a program, stages, parts of K: us at 1, 8 and 16 rows, share of copy bandwidth at 8")
    outputs = (16, 32, 64, 128) if len(weight) == 3 and not is_int4(weight) else (choice_of(weight).n,)
    for choice in (small_m.Blocks(n, s, p) for n in outputs for s in (3, 4, 5, 6) for p in (1, 2, 3, 4, 6, 8)):
        try:
            check(name, weight, k, choice)
            us = {m: time_rows(x, weights, choice) for m, x in inputs.items()}
        except Exception as error:  # mostly too much shared memory, for which Triton has no exception class
            click.echo(f"  {choice.n:4} {choice.stages} {choice.parts}: {str(error).splitlines()[0][:80]}")
            continue
        share = nbytes(weight) / (1e-6 * us[8]) / bandwidth
        times = " ".join(f"{value:8.1f}" for value in us.values())
        click.echo(f"  {choice.n:4} {choice.stages} {choice.parts}: {times} {share:6.0%}")


@click.command(epilog="Example: python scripts/gpu/bench_small_m.py --linear down --linear gate_up --json small_m.json")
@click.option("--linear", "names", type=click.Choice(list(LINEARS)), multiple=True, help="Only these; may be repeated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the times here too.")
@click.option("--sweep", "sweeping", is_flag=True, help=f"Try block sizes, on one --linear ({GOAL_LINEAR}).")
def main(names: tuple[str, ...], json_file: Path | None, sweeping: bool) -> None:
    """Check the small-M kernels on this machine's CUDA GPU, then time them."""
    if not torch.cuda.is_available():
        click.echo("This needs a CUDA GPU and found none; nothing was run.")
        return
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    click.echo(f"{device}, torch {torch.__version__}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    if sweeping:
        if len(names) > 1:
            raise click.UsageError(f"--sweep takes one --linear, not {len(names)}")
        sweep(names[0] if names else GOAL_LINEAR, bandwidth)
        return
    timings = []
    for name in names or LINEARS:
        timings.append(time_linear(name, bandwidth))
        show(timings[-1])
        torch.cuda.empty_cache()
    quoted = ", ".join(f"{m}: {ms} ms" for m, ms in INT4_PLAIN_MM.items())
    click.echo(f"ExecuTorch's int4_plain_mm by rows, quoted from pytorch/executorch PR 21456 (A100): {quoted}")
    for timing in timings:
        if timing.linear == GOAL_LINEAR:
            show_goals(timing)
    if json_file:
        found = {"device": device, "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
        json_file.write_text(json.dumps(found | {"linears": [asdict(timing) for timing in timings]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
