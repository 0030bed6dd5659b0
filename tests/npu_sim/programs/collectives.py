"""Every collective on simulated devices and, with the same numbers, through gloo. A case returns what differed."""

import os
import random
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from anabatic_sim import shared_memory

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}
REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64)
COPIED = (*REDUCIBLE, torch.uint8, torch.float64, torch.bool)  # gloo knows no int16
ROUNDING = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # gloo rounds in another order
Tensors = list[torch.Tensor]


def numbers(rank: int, count: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return (torch.randn(count, generator=generator) * 3).to(dtype).to(device)


def reductions(rank: int, world: int) -> Iterator[tuple[str, float, Callable[[str], Tensors]]]:
    for dtype in REDUCIBLE:
        tolerance = ROUNDING.get(dtype, 1e-6 if dtype.is_floating_point else 0)
        for name, op in OPS.items():
            if name == "prod" and dtype == torch.bfloat16:
                continue  # refused, see `refusals`

            def all_reduce(device: str, dtype: torch.dtype = dtype, op: dist.ReduceOp = op) -> Tensors:
                tensor = numbers(rank, 1001, device, dtype)
                dist.all_reduce(tensor, op)
                return [tensor]

            yield f"all_reduce {dtype} {name}", tolerance, all_reduce

    def average(device: str) -> Tensors:
        tensor = numbers(rank, 2_000_003, device)  # still under way when the division behind it is launched
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        return [tensor]

    def reduce(device: str) -> Tensors:
        tensor = numbers(rank, 13, device)
        dist.reduce(tensor, world - 1)
        return [tensor] if rank == world - 1 else []

    def scatter_one(device: str) -> Tensors:
        out = torch.empty(13, device=device)
        dist.reduce_scatter_tensor(out, numbers(rank, 13 * world, device))
        return [out]

    def scatter_list(device: str) -> Tensors:
        out = torch.empty(5, device=device)
        parts = [numbers(rank, 5, device, seed=peer) for peer in range(world)]
        dist.reduce_scatter(out, parts)
        return [out]

    yield "average", 1e-6, average
    yield "reduce", 1e-6, reduce
    yield "reduce_scatter_tensor", 1e-6, scatter_one
    yield "reduce_scatter", 1e-6, scatter_list


def copies(rank: int, world: int) -> Iterator[tuple[str, float, Callable[[str], Tensors]]]:
    for dtype in COPIED:

        def broadcast(device: str, dtype: torch.dtype = dtype) -> Tensors:
            tensor = numbers(rank, 77, device, dtype)
            dist.broadcast(tensor, world - 1)
            return [tensor]

        def gather(device: str, dtype: torch.dtype = dtype) -> Tensors:
            out = torch.empty(77 * world, dtype=dtype, device=device)
            dist.all_gather_into_tensor(out, numbers(rank, 77, device, dtype))
            return [out]

        def exchange(device: str, dtype: torch.dtype = dtype) -> Tensors:
            out = torch.empty(8 * world, dtype=dtype, device=device)
            dist.all_to_all_single(out, numbers(rank, 8 * world, device, dtype))
            return [out]

        yield f"broadcast {dtype}", 0, broadcast
        yield f"all_gather_into_tensor {dtype}", 0, gather
        yield f"all_to_all_single {dtype}", 0, exchange

    def gather_list(device: str) -> Tensors:
        out = [torch.empty(400_001, device=device) for _ in range(world)]
        dist.all_gather(out, numbers(rank, 400_001, device))
        return out

    def scatter(device: str) -> Tensors:
        out = torch.empty(4, device=device)
        dist.scatter(out, [numbers(rank, 4, device, seed=peer) for peer in range(world)] if rank == 0 else None, 0)
        return [out]

    def uneven(device: str) -> Tensors:
        sent, received = [peer + 1 + rank for peer in range(world)], [rank + 1 + peer for peer in range(world)]
        out = torch.empty(sum(received), device=device)
        dist.all_to_all_single(out, numbers(rank, sum(sent), device), received, sent)
        return [out]

    yield "all_gather", 0, gather_list
    yield "scatter", 0, scatter
    yield "uneven all_to_all_single", 0, uneven


def meetings(rank: int, world: int) -> Iterator[tuple[str, float, Callable[[str], Tensors]]]:
    after, before = (rank + 1) % world, (rank - 1) % world

    def one_way(device: str, source: int, target: int) -> Tensors:
        tensor = numbers(rank, 9, device) if rank == source else torch.zeros(9, device=device)
        if rank == source:
            dist.send(tensor, target)
        elif rank == target:
            dist.recv(tensor, source)
        return [tensor]

    def ring(device: str) -> Tensors:
        out = torch.zeros(300_000, device=device)  # more than a channel holds: all must move together
        sent = numbers(rank, 300_000, device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, out, before)]):
            work.wait()
        return [out]

    def handles(device: str) -> Tensors:
        first, second = numbers(rank, 2_000_000, device), numbers(rank, 7, device, seed=1)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        untouched = torch.ones(3, device=device) * 2  # the host continues
        for work in works:
            work.wait()
        return [first * 1, second, untouched]

    yield "send up", 0, lambda device: one_way(device, 0, world - 1)
    yield "send down", 0, lambda device: one_way(device, world - 1, 0)
    yield "ring of batch_isend_irecv", 0, ring
    yield "async handles", 1e-5, handles


def groups(rank: int, world: int) -> Iterator[tuple[str, float, Callable[[str], Tensors]]]:
    everybody = list(range(world))
    halves = [dist.new_group(everybody[: world // 2]), dist.new_group(everybody[world // 2 :])]

    def half(device: str) -> Tensors:
        tensor = numbers(rank, 5, device)
        group = halves[0 if rank < world // 2 else 1]
        dist.all_reduce(tensor, group=group)
        return [tensor]

    def coalesced(device: str) -> Tensors:
        tensors = [numbers(rank, 5 + i, device, seed=i) for i in range(3)]
        if device == "cpu":
            for tensor in tensors:
                dist.all_reduce(tensor)
        else:
            with dist._coalescing_manager(device=torch.device("npu"), async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            manager.wait()
        return tensors

    yield "groups", 1e-6, half
    yield "coalesced", 1e-6, coalesced


def compare(rank: int, world: int) -> dict[str, object]:
    wrong, count = [], 0
    for cases in (reductions, copies, meetings, groups):
        for name, tolerance, run in cases(rank, world):
            count += 1
            for npu, cpu in zip(run("npu"), run("cpu"), strict=True):
                close = torch.allclose(npu.cpu().double(), cpu.double(), rtol=tolerance, atol=tolerance * 10)
                if not close:
                    wrong.append(name)
    return {"wrong": wrong, "count": count}


def own_sums(rank: int, world: int) -> dict[str, object]:
    """What gloo cannot do: int16, lists of tensors in all_to_all, the same bits on every rank, many sizes."""
    wrong = []
    for op in ("sum", "max", "min"):
        tensor = torch.full((10,), rank + 1, dtype=torch.int16, device="npu")
        dist.all_reduce(tensor, OPS[op])
        expected = {"sum": world * (world + 1) // 2, "max": world, "min": 1}[op]
        if tensor.tolist() != [expected] * 10:
            wrong.append(f"int16 {op}")
    out = [torch.empty(2, device="npu") for _ in range(world)]
    dist.all_to_all(out, [torch.full((2,), float(10 * rank + peer), device="npu") for peer in range(world)])
    if [tensor.tolist() for tensor in out] != [[10.0 * peer + rank] * 2 for peer in range(world)]:
        wrong.append("all_to_all")
    for size in (1, 2, world - 1, world, world + 1, 4097, 300_001):
        tensor = numbers(rank, size, "npu")
        dist.all_reduce(tensor)
        gathered = torch.empty(world * size, device="npu")
        dist.all_gather_into_tensor(gathered, tensor)
        rows = gathered.cpu().view(world, size)
        total = numbers(0, size, "cpu")
        for peer in range(1, world):
            total += numbers(peer, size, "cpu")  # in rank order: the same bits
        if not all(torch.equal(row, total) for row in rows):
            wrong.append(f"bits of {size}")
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    if objects != [{"rank": peer} for peer in range(world)]:
        wrong.append("objects")
    return {"wrong": wrong}


def refusals(rank: int, world: int) -> dict[str, str]:
    said = {}
    double, boolean = torch.ones(4, dtype=torch.float64, device="npu"), torch.ones(4, dtype=torch.bool, device="npu")
    attempts = {
        "prod of bfloat16": lambda: dist.all_reduce(torch.ones(4, dtype=torch.bfloat16, device="npu"), OPS["prod"]),
        "sum of float64": lambda: dist.all_reduce(double),
        "sum of bool": lambda: dist.all_reduce(boolean),
        "bitwise": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32, device="npu"), dist.ReduceOp.BAND),
        "not contiguous": lambda: dist.all_reduce(torch.ones(4, 4, device="npu").t()),
        "any source": lambda: dist.recv(torch.ones(4, device="npu")),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            torch.npu.synchronize()
            said[name] = "went through"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def other_order(rank: int, world: int) -> list[list[float]]:
    """Collectives of two groups launched in different order, and a host that waits for another host in between."""
    first, second = dist.new_group(), dist.new_group()
    one, ten = torch.ones(2, device="npu"), torch.full((2,), 10.0, device="npu")
    for group in (None, first, second):
        dist.all_reduce(
            torch.zeros(1, device="npu"), group=group
        )  # making a communicator blocks the host, on hardware too
    calls = [(one, first), (ten, second)]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in (calls if rank % 2 else calls[::-1])
    ]
    for work in works:
        work.wait()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.all_reduce(one)  # on the stream: the host is not blocked
        store.set("continue", "yes")
    else:
        store.get("continue")
        dist.all_reduce(one)
    return [one.tolist(), ten.tolist()]


def storm(rank: int, world: int) -> int:
    """Several hundred collectives of four groups in a random but common order, waited for in a random order."""
    chance = random.Random(5)
    groups = [None, *(dist.new_group() for _ in range(3))]
    under_way: list[tuple[dist.Work, torch.Tensor, float]] = []
    wrong = 0

    def filled(count: int, value: float) -> torch.Tensor:
        return torch.full((count,), float(value), device="npu")

    for turn in range(300):
        group, count = chance.choice(groups), chance.choice([1, 7, 1000, 70001])
        if turn % 4 == 0:
            result, expected = filled(count, rank + turn), float(sum(peer + turn for peer in range(world)))
            work = dist.all_reduce(result, group=group, async_op=True)
        elif turn % 4 == 1:
            result, expected = filled(count * world, -1), float(turn)
            work = dist.all_gather_into_tensor(result, filled(count, turn), group=group, async_op=True)
        elif turn % 4 == 2:
            result, expected = filled(count, -1), float(sum(range(world)))
            work = dist.reduce_scatter_tensor(result, filled(count * world, rank), group=group, async_op=True)
        else:
            result, expected = filled(count, rank * 1000 + turn), float(1000 + turn)
            work = dist.broadcast(result, 1, group=group, async_op=True)
        under_way.append((work, result, expected))
        while under_way and (len(under_way) > 6 or chance.random() < 0.4 or turn == 299):
            work, result, expected = under_way.pop(chance.randrange(len(under_way)))
            work.wait()
            wrong += not bool((result == expected).all())
    return wrong


def graph(rank: int, world: int) -> list[list[float]]:
    """Collectives of a graph, between others of the same group: a capture sends nothing, a replay takes its turn."""
    x = torch.full((4,), float(rank + 1), device="npu")
    parts = torch.zeros(4 * world, device="npu")
    dist.all_reduce(torch.ones(2, device="npu"))  # makes the communicator, which a capture does not
    recorded = torch.npu.NPUGraph()
    with torch.npu.graph(recorded):
        total = x * 2
        dist.all_reduce(total)
        dist.all_gather_into_tensor(parts, x)
        after = total + 1
    found = [parts.tolist()]
    for step in range(3):
        x.add_(step)
        recorded.replay()
        between = torch.ones(1, device="npu")
        dist.all_reduce(between)
        found.append([*after[:1].tolist(), *parts[::4].tolist(), *between.tolist()])
    return found


def count(rank: int, world: int) -> dict[str, int]:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000, device="npu"))
    torch.npu.synchronize()
    with shared_memory.attach_segment(os.environ["ANABATIC_SIM_SEGMENT"]) as machine:
        row = machine.device[rank]
        return {"collectives": row.collectives, "bytes": row.collective_bytes, "busy": row.busy_ns > 0}


def speed(rank: int, world: int, megabytes: str) -> float:
    tensor = torch.ones(int(megabytes) * 2**18, device="npu")
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    start = time.monotonic()
    for _ in range(5):
        dist.all_reduce(tensor)
    torch.npu.synchronize()
    return (time.monotonic() - start) / 5
