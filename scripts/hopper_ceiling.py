#!/usr/bin/env python3
"""What the sm_90a attention kernels can reach at most on an H200, by arithmetic: the counts in docs/internals/hopper.md.

  scripts/hopper_ceiling.py          those lines on stdout
  scripts/hopper_ceiling.py --check  whether docs/internals/hopper.md has them

Counts are clocks of one multiprocessor for one tile: of the tensor cores, of the units that make exp2, of shared memory, of
the schedulers. All four run side by side at best, so that the longest is a bound. Tiles are those of kernels/attention/sm90_forward.cu
and kernels/attention/sm90_backward.cu.
"""
import functools
import heapq
import os
import sys

from written_page import write_or_check

MULTIPROCESSORS = 132
FMA, EXP, SHARED = 2048, 16, 128  # of a multiprocessor in a clock: dense bf16 FMAs, exp2s, bytes of shared memory
# Instructions that a warp issues in a step without a mask: scripts/hopper_overlap.py's counts of what nvcc 13.0 makes. Each of
# the four schedulers, which issue one in a clock, has one warp of each warpgroup.
INSTRUCTIONS = {"forward": {64: 429, 96: 443, 128: 481, 256: 482}, "backward": {64: 555, 96: 371, 128: 380, 256: 397}}
SHEET_TFLOPS, MEASURED_TFLOPS, BYTES_PER_S, L2_BYTES = 989.4, 790.0, 4.3e12, 50 * 2 ** 20
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "internals", "hopper.md")
HEAD_DIMS = (64, 96, 128, 256)
GANG, MANY_HEADS, L2_SHARE = 8, 4, 0.6  # as in kernels/attention/sm90_backward.cu
# Clocks of forward, guessed: from asking for Q until it has come from memory; of a warpgroup's O to shared memory; until a copy
# has read it there. What a tile of queries takes beyond its steps is taken from tiles of so many steps.
Q_CLOCKS, O_CLOCKS, O_READ_CLOCKS, TILE_STEPS = 1000, 400, 500, 8
HOP_STEPS, START_STEPS = 1.2, 2.0  # of backward: until the next block's turn at a dQ; before a block's first product
# HOP_STEPS by FlashAttention-3: two sequences of 16 heads of 128, T 8192, causal, TFLOP/s in any order and with turns, blocks of
# queries in descending order (github.com/Dao-AILab/flash-attention/pull/1893); four heads at a time, whose Q, dO and dQ are
# what its SingleTileBwdLPTScheduler lets 40 MB hold.
MEASURED_ANY_ORDER, MEASURED_TURNS, MEASURED_HEADS = 574.7, 464.0, 4


def wgmma(columns, depth, from_shared):
    """Bytes of shared memory that 64 x columns x depth reads: B once, and A where it isn't in registers."""
    return depth // 16 * (32 * columns + (64 * 32 if from_shared else 0))


class Tile:
    """Clocks of one query tile by key tile."""

    def __init__(self, queries, keys, products, depth, exp_elements, shared_bytes, issued):
        self.queries, self.keys, self.issue = queries, keys, issued
        self.mma = products * queries * keys * depth // FMA
        self.exp = exp_elements // EXP
        self.shared = shared_bytes // SHARED

    @property
    def clocks(self):
        return max(self.units.values())

    @property
    def units(self):
        return {"mma": self.mma, "exp2": self.exp, "shared memory": self.shared, "issue": self.issue}

    @property
    def bound(self):
        return " and ".join(name for name, clocks in self.units.items() if clocks == self.clocks)

    @property
    def ceiling(self):
        return MEASURED_TFLOPS * self.mma / self.clocks


def forward(D):
    groups, keys = (3 if D == 64 else 2), (80 if D == 256 else 128)
    queries = 64 * groups
    reads = groups * (wgmma(keys, D, True) + wgmma(D, keys, False))
    copies = 2 * keys * 2 * D  # K and V arrive; Q and O come and go once for all keys
    rescaling = 2 * 128 * groups  # exp2 of what a thread's two rows' maxima have grown by
    return Tile(queries, keys, 2, D, queries * keys + rescaling, reads + copies, groups * INSTRUCTIONS["forward"][D])


def backward(D):
    split_keys, queries = D <= 128, (128 if D == 64 else 64)
    keys = 128 if split_keys else 64
    part = queries if split_keys else queries // 2  # columns of S^T and dP^T of a warpgroup
    columns = D if split_keys else D // 2           # of its dK and dV
    dq = D if queries == 128 else D // 2            # of its dQ
    reads = 2 * (wgmma(part, D, True) + wgmma(part, D, D != 96) +  # S; dP, whose V is in registers at head dim 96
                 2 * wgmma(columns, queries, not split_keys) + wgmma(dq, keys, True))
    scores = 2 * queries * keys * (1 if split_keys else 2)  # dS, and P where it goes through shared memory
    dq_bytes = 2 * 4 * queries * D                           # written, and read by the copy that adds
    copies = 2 * 2 * queries * D + 8 * queries               # Q, dO, lse, delta arrive
    rows = 8 * (part // 8) * 2 * 128                         # lse and delta: a read for a warp's eight columns each
    return Tile(queries, keys, 5, D, queries * keys, reads + scores + dq_bytes + copies + rows,
                2 * INSTRUCTIONS["backward"][D])


# --- Schedules: B sequences, H heads, G of K and V; causal, or full ---

def section_heads(D, B, H, G, T):
    """Heads whose keys and values share the L2 cache, 0: all: sm90_section_heads."""
    fit = 0.6 * L2_BYTES / (2 * T * D * 2)
    return 0 if H // G >= 4 or fit >= B * G else H // G * max(1, int(fit))


def forward_items(count, heads, section, full):
    """What a block takes at a time, as tiles of queries from the first on: one or, in sections with a causal mask, two."""
    if not section:
        return [(block,) for block in reversed(range(count)) for _ in range(heads)]
    items = []
    for first in range(0, heads, section):
        some = min(section, heads - first)
        if full:
            items += [(block,) for block in reversed(range(count)) for _ in range(some)]
        else:
            items += [(count - 1 - i, i) for i in range(count // 2) for _ in range(some)]
            if count % 2:
                items += [(count // 2,) * min(2, some - i) for i in range(0, some, 2)]
    return items


@functools.lru_cache(maxsize=None)
def clocks_between(D, apart):
    """Clocks that a tile of queries takes beyond those of its steps. Each warpgroup does step by step: S of the next keys, O += P V
    of the last ones behind it, softmax of S beside that; then the last O += P V, and O's way out. Q is asked for before the last
    O += P V where O lies apart, else after O has been read. The tensor cores serve one product at a time, softmax has the
    longer of exp2's and the schedulers' clocks."""
    tile, tiles = forward(D), 50
    groups = tile.queries // 64
    product, softmax = tile.mma / groups / 2, max(tile.exp, tile.issue) / groups
    tensor = units = 0.0
    waiting = [(0.0, group, 0) for group in range(groups)]  # when, who, how many steps it has begun
    last = 0.0
    while waiting:
        now, group, step = heapq.heappop(waiting)
        begin, of_tile = max(now, tensor), step % (TILE_STEPS + 1)
        if of_tile == TILE_STEPS:  # the last O += P V
            tensor = begin + product
            out = tensor + O_CLOCKS
            last = max(last, out)
            following = max(out, now + Q_CLOCKS) if apart else out + O_READ_CLOCKS + Q_CLOCKS
        else:
            scores = begin + product
            tensor = scores + (product if of_tile else 0)
            units = max(units, scores) + softmax
            following = max(tensor, units)
        if step + 1 < tiles * (TILE_STEPS + 1):
            heapq.heappush(waiting, (following, group, step + 1))
    return last / tiles - TILE_STEPS * tile.clocks


def forward_share(tile, D, B, H, G, T, full, apart):
    """Counted work over the time of the block that is last. Longest first goes every other round backwards."""
    count, section = -(-T // tile.queries), section_heads(D, B, H, G, T)
    length = [-(-(T if full else min((i + 1) * tile.queries, T)) // tile.keys) for i in range(count)]
    items, between = forward_items(count, B * H, section, full), clocks_between(D, apart) / tile.clocks
    grid = min(MULTIPROCESSORS, B * H * count)
    loads = [0] * grid
    for at, blocks in enumerate(items):
        place = at % grid
        loads[grid - 1 - place if not section and at // grid % 2 else place] += sum(length[block] + between for block in blocks)
    counted = B * H * T * T / (1 if full else 2) / (tile.queries * tile.keys)
    return counted / (max(loads) * MULTIPROCESSORS)


def backward_at_once(D, heads, T):
    """KV heads of a section, at most: sm90_backward_order."""
    held = L2_SHARE * L2_BYTES / (8 * T * D * heads)
    return max(min(int(held), MULTIPROCESSORS), MULTIPROCESSORS // GANG)


def backward_order(units, blocks, heads, most):
    """(KV head, block of keys) in the order of their indices, and the blocks of a gang, or 0: sm90_backward_order. At most so
    many KV heads at a time."""
    sections = -(-units // most)
    section = -(-units // sections)
    order = [(unit, block) for first in range(0, units, section) for block in range(blocks)
             for unit in range(first, min(first + section, units))]
    return order, (0 if heads < MANY_HEADS else max(1, MULTIPROCESSORS // section))


@functools.lru_cache(maxsize=None)
def backward_share(queries, keys, B, H, G, T, full, hop, buffers, at_once):
    """The same of backward, step by step; hop None: in any order. Else a block's turn at a tile comes `hop` steps after the
    start of the one before, and a step can't end before dQ of as many steps before as there are buffers has gone. Who has a
    lower index never waits for a higher one, so that the blocks can be followed one after another."""
    tiles, blocks, heads, units = -(-T // queries), -(-T // keys), H // G, B * G
    order, gang = backward_order(units, blocks, heads, at_once)
    free, last = [0.0] * MULTIPROCESSORS, [[0.0] * (tiles * heads) for _ in range(units)]  # of tiles from the last to the first
    for unit, block in order:
        now, before, copy, done, left = free[0] + START_STEPS, 0.0, 0.0, last[unit], tiles - (0 if full else block * keys // queries)
        if hop is None:
            heapq.heapreplace(free, now + left * heads)
            continue
        ascends = gang and block // gang % 2
        turns = [t for tile in range(left - 1, -1, -1) for t in done[tile * heads:(tile + 1) * heads]] if ascends else done
        copies = []
        for turn in turns[:left * heads]:
            now += 1
            held = copy if buffers == 1 else before
            if held > now:
                now = held
            before, copy = copy, (now if now > turn else turn) + hop
            copies.append(copy)
        done[:left * heads] = [t for tile in range(left - 1, -1, -1) for t in copies[tile * heads:(tile + 1) * heads]
                               ] if ascends else copies
        heapq.heapreplace(free, max(now, before, copy))
    counted = B * H * T * T / (1 if full else 2) / (queries * keys)
    return counted / (max(free) * MULTIPROCESSORS)


def backward_sides(D, B, H, T, any_order):
    """Seconds of what runs before and after: delta from out and dout, dQ from fp32 to bf16; in any order, its zeroes."""
    return (2 * 2 + 4 + 2 + (4 if any_order else 0)) * B * T * H * D / BYTES_PER_S


def turns_of_any_order():
    """Of FlashAttention-3's two measurements without what runs before and after, dQ's zeroes in both: as measured, as modeled."""
    b, flops, sides = backward(128), 5 * 2 * 16 * 8192 ** 2 * 128, backward_sides(128, 2, 16, 8192, True)
    with_turns, any_order = (backward_share(b.queries, b.keys, 2, 16, 16, 8192, False, hop, 1, MEASURED_HEADS)
                             for hop in (HOP_STEPS, None))
    seconds = [flops / (tflops * 1e12) - sides for tflops in (MEASURED_ANY_ORDER, MEASURED_TURNS)]
    return seconds[0] / seconds[1], with_turns / any_order


def predicted(D, B, H, G, T, full):
    """TFLOP/s of forward, of backward in any order, of deterministic backward."""
    flops = (4 if full else 2) * B * H * T * T * D  # two products, half of each where causal
    f, b = forward(D), backward(D)
    rates = [f.ceiling * forward_share(f, D, B, H, G, T, full, D <= 128)]
    for any_order in (D < 256 or H == G, False):  # at 256 several heads a group take turns all the same
        rate = b.ceiling * backward_share(b.queries, b.keys, B, H, G, T, full, None if any_order else HOP_STEPS,
                                          1 if D == 256 else 2, backward_at_once(D, H // G, T))
        rates.append(2.5 * flops / (2.5 * flops / (rate * 1e12) + backward_sides(D, B, H, T, any_order)) / 1e12)
    return rates


# --- The page ---

HEAD = """## Ceilings, by arithmetic

Written by `scripts/hopper_ceiling.py`; a test holds this part to it. **Nothing in it was measured by this project.**

Clocks of one multiprocessor for one tile of queries by one of keys, each unit's alone. Assumed:

- Tensor cores: 2048 dense bf16 FMAs, 4096 FLOP, in a clock. 132 multiprocessors x 4096 x 1.83 GHz = 989.4 TFLOP/s, the data
  sheet's figure. An m64nNk16 takes N / 2 clocks.
- exp2: 16 in a clock (CUDA's table of arithmetic throughput, compute capability 9.0). Forward makes two more a thread and tile,
  of what its rows' maxima have grown by.
- Issue: each of four schedulers issues one instruction in a clock, of one warp of each warpgroup that multiplies. How many a warp
  has in a step without a mask is counted in the machine code (`scripts/hopper_overlap.py`, nvcc 13.0): forward {forward},
  backward {backward} at head dims 64, 96, 128 and 256. What waits and the warpgroup that copies issue comes on top.
- Shared memory: 128 bytes in a clock, whoever moves them. A wgmma reads its B (32 N bytes) and, where A is not in
  registers, A (2 KB); each warpgroup reads for itself. TMA's and bulk copies' bytes count, as do stores of dS (and P) and of
  dQ. No bank conflicts.
- The rate at which the tensor cores really run is that of a large cuBLAS bf16 matmul on random data on an H200, 790 TFLOP/s,
  which is what power allows. A ceiling is 790 times the tensor cores' clocks over those of the longest unit: it takes the
  four to run side by side without a gap. Where several are near the longest, as in forward at head dim 64, that can't be
  reached: there a scheduler would have to issue in {busy:.0f} % of all clocks while exp2's units never rest.
"""

TABLE_HEAD = """| | head dim | queries x keys | tensor cores | exp2 | shared memory | issue | bound by | ceiling TFLOP/s |
|---|---|---|---|---|---|---|---|---|"""

SCHEDULE = """With a schedule: B = 2, 64 query heads over 8 of keys and values, or over 64, TFLOP/s as usually counted (causal: half of
the matrix; backward 2.5 times forward). A tile that the diagonal cuts costs a whole one; 132 multiprocessors take the tiles in
the kernels' order, with an L2 cache of 50 MiB, and the last one to end counts. Forward's tiles take some clocks more than their
steps: see below. Backward is followed step by step, a block taking two steps to start. The
deterministic one waits for its turns at dQ, a turn coming {hop} of a step after the one before began; in any order there are no
turns, and dQ is filled with zeroes first. {hop} is what gives FlashAttention-3's ratio in the same model: at head dim 128, causal,
T = 8192, 32 heads in all, {turns:.0f} TFLOP/s with turns in this order over {any:.1f} in any, {ratio:.2f}, both
[measured by its authors](https://github.com/Dao-AILab/flash-attention/pull/1893). FlashAttention-3 has four heads at work at a time
where this engine has 16 and more, has one buffer of dQ where this engine has two up to head dim 128 (a step then waits only until dQ of two
steps before has gone), and fills with zeroes either way. That a turn takes as long here, and as many steps at other head dims, is taken for
granted. Passes over delta and dQ are added at 4.3 TB/s. All L2 hits
are taken for granted, and L2's rate of additions for enough, also where several blocks add to one tile at once: so the figures
in any order are the more optimistic ones.
"""
SCHEDULE_HEAD = """| head dim | mask | heads | T | forward | backward, any order | backward, deterministic | of any order |
|---|---|---|---|---|---|---|---|"""
BETWEEN = """
What a tile of queries takes beyond its steps, by a simulation of its warpgroups, step by step, with tiles of {steps} steps: the
tensor cores serve one product at a time, exp2's units and the schedulers one warpgroup's softmax. Guessed: Q arrives {q} clocks
after it was asked for, O is in shared memory {o} clocks after the last product, and has been read there {read} clocks later. Where
O goes through Q's place, it must have been read before the next Q is asked for. From a place of its own ("apart") it leaves during
the next tile, whose Q is asked for before the last product. Head dim 256 has no room for that: its columns "apart" say what it
would bring. TFLOP/s with 64 heads over 8.
"""
BETWEEN_HEAD = """| head dim | clocks, O through Q's place | apart | causal, T 1024 | apart | causal, T 4096 | apart | full, T 1024 | apart |
|---|---|---|---|---|---|---|---|---|"""


def between_rows():
    for D in HEAD_DIMS:
        tile = forward(D)
        cells = [f"{clocks_between(D, apart):.0f}" for apart in (False, True)]
        for T, full in ((1024, False), (4096, False), (1024, True)):
            cells += [f"{tile.ceiling * forward_share(tile, D, 2, 64, 8, T, full, apart):.0f}" for apart in (False, True)]
        yield f"| {D} | " + " | ".join(cells) + " |"


# Those of scripts/gpu_check.sh, and shorter ones of the other head dims.
LENGTHS = {64: (1024, 2048, 4096, 8192, 16384), 96: (1024, 4096), 128: (1024, 2048, 4096, 8192, 16384), 256: (1024, 4096)}


def lines():
    assert abs(MULTIPROCESSORS * 2 * FMA * 1.83e9 / 1e12 - SHEET_TFLOPS) < 0.1
    (measured, modeled), tile = turns_of_any_order(), forward(64)
    assert abs(measured - modeled) < 0.004, f"HOP_STEPS gives {modeled:.3f} of any order, measured was {measured:.3f}"
    counts = {name: ", ".join(str(count) for count in each.values()) for name, each in INSTRUCTIONS.items()}
    text = [HEAD.format(busy=100 * tile.issue / tile.clocks, **counts), TABLE_HEAD]
    for name, make in (("forward", forward), ("backward", backward)):
        for D in HEAD_DIMS:
            t = make(D)
            text.append(f"| {name} | {D} | {t.queries} x {t.keys} | {t.mma} | {t.exp} | {t.shared} | {t.issue} | {t.bound} | {t.ceiling:.0f} |")
    schedule = SCHEDULE.format(hop=HOP_STEPS, turns=MEASURED_TURNS, any=MEASURED_ANY_ORDER, ratio=MEASURED_TURNS / MEASURED_ANY_ORDER)
    text += ["", schedule, SCHEDULE_HEAD]
    for D in HEAD_DIMS:
        for full in (False, True):
            for G in (8, 64):
                for T in LENGTHS[D]:
                    rates = predicted(D, 2, 64, G, T, full)
                    text.append(f"| {D} | {'full' if full else 'causal'} | 64/{G} | {T} | " +
                                " | ".join(f"{r:.0f}" for r in rates) + f" | {rates[2] / rates[1]:.2f} |")
    text += [BETWEEN.format(steps=TILE_STEPS, q=Q_CLOCKS, o=O_CLOCKS, read=O_READ_CLOCKS), BETWEEN_HEAD, *between_rows()]
    return "\n".join(text) + "\n"


def main():
    return write_or_check(lines(), PAGE, sys.argv[1:] == ["--check"], "docs/internals/hopper.md has not what scripts/hopper_ceiling.py "
                          "writes: put that in its place", part=True)


if __name__ == "__main__":
    sys.exit(main())
