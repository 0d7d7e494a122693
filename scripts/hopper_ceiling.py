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

from written_page import tables_as_blocks, write_or_check

MULTIPROCESSORS = 132
FMA, EXP, SHARED = 2048, 16, 128  # of a multiprocessor in a clock: dense bf16 FMAs, exp2s, bytes of shared memory
# Instructions that a warp issues in a step without a mask: scripts/hopper_overlap.py's counts of what nvcc 13.0 makes. Each of
# the four schedulers, which issue one in a clock, has one warp of each warpgroup.
INSTRUCTIONS = {"forward": {64: 429, 96: 443, 128: 481, 256: 482}, "backward": {64: 555, 96: 371, 128: 380, 256: 397}}
SHEET_TFLOPS, MEASURED_TFLOPS, BYTES_PER_S, L2_BYTES = 989.4, 790.0, 4.3e12, 50 * 2 ** 20
PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "internals", "hopper.md")
HEAD_DIMS = (64, 96, 128, 256)
GANG, MANY_HEADS, L2_SHARE = 8, 4, 0.6  # as in kernels/attention/sm90_backward_plan.cuh
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
        return max(self.mma, self.exp, self.shared, self.issue)

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


# --- Schedules: B sequences, H heads, G of K and V; causal ---

def section_heads(D, B, H, G, T):
    """Heads whose keys and values share the L2 cache, 0: all: sm90_section_heads."""
    fit = 0.6 * L2_BYTES / (2 * T * D * 2)
    return 0 if H // G >= 4 or fit >= B * G else H // G * max(1, int(fit))


def forward_items(count, heads, section):
    """What a block takes at a time, as tiles of queries from the first on: one or, in sections, two."""
    if not section:
        return [(block,) for block in reversed(range(count)) for _ in range(heads)]
    items = []
    for first in range(0, heads, section):
        some = min(section, heads - first)
        items += [(count - 1 - i, i) for i in range(count // 2) for _ in range(some)]
        if count % 2:
            items += [(count // 2,) * min(2, some - i) for i in range(0, some, 2)]
    return items


@functools.lru_cache(maxsize=None)
def clocks_between(D):
    """Clocks that a tile of queries takes beyond those of its steps. Each warpgroup does step by step: S of the next keys, O += P V
    of the last ones behind it, softmax of S beside that; then the last O += P V, and O's way out. Q is asked for before the last
    O += P V where O has a place of its own, up to head dim 128, else after O has been read. The tensor cores serve one product at a
    time, softmax has the longer of exp2's and the schedulers' clocks."""
    tile, tiles, own_place = forward(D), 50, D <= 128
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
            following = max(out, now + Q_CLOCKS) if own_place else out + O_READ_CLOCKS + Q_CLOCKS
        else:
            scores = begin + product
            tensor = scores + (product if of_tile else 0)
            units = max(units, scores) + softmax
            following = max(tensor, units)
        if step + 1 < tiles * (TILE_STEPS + 1):
            heapq.heappush(waiting, (following, group, step + 1))
    return last / tiles - TILE_STEPS * tile.clocks


def forward_share(tile, D, B, H, G, T):
    """Counted work over the time of the block that is last. Longest first goes every other round backwards."""
    count, section = -(-T // tile.queries), section_heads(D, B, H, G, T)
    length = [-(-min((i + 1) * tile.queries, T) // tile.keys) for i in range(count)]
    items, between = forward_items(count, B * H, section), clocks_between(D) / tile.clocks
    grid = min(MULTIPROCESSORS, B * H * count)
    loads = [0] * grid
    for at, blocks in enumerate(items):
        place = at % grid
        loads[grid - 1 - place if not section and at // grid % 2 else place] += sum(length[block] + between for block in blocks)
    counted = B * H * T * T / 2 / (tile.queries * tile.keys)
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
def backward_share(queries, keys, B, H, G, T, hop, buffers, at_once):
    """The same of backward, step by step; hop None: in any order. Else a block's turn at a tile comes `hop` steps after the
    start of the one before, and a step can't end before dQ of as many steps before as there are buffers has gone. Who has a
    lower index never waits for a higher one, so that the blocks can be followed one after another."""
    tiles, blocks, heads, units = -(-T // queries), -(-T // keys), H // G, B * G
    order, gang = backward_order(units, blocks, heads, at_once)
    free, last = [0.0] * MULTIPROCESSORS, [[0.0] * (tiles * heads) for _ in range(units)]  # of tiles from the last to the first
    for unit, block in order:
        now, before, copy, done, left = free[0] + START_STEPS, 0.0, 0.0, last[unit], tiles - block * keys // queries
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
    counted = B * H * T * T / 2 / (queries * keys)
    return counted / (max(free) * MULTIPROCESSORS)


def backward_sides(D, B, H, T, any_order):
    """Seconds of what runs before and after: delta from out and dout, dQ from fp32 to bf16; in any order, its zeroes."""
    return (2 * 2 + 4 + 2 + (4 if any_order else 0)) * B * T * H * D / BYTES_PER_S


def turns_of_any_order():
    """Of FlashAttention-3's two measurements without what runs before and after, dQ's zeroes in both: as measured, as modeled."""
    b, flops, sides = backward(128), 5 * 2 * 16 * 8192 ** 2 * 128, backward_sides(128, 2, 16, 8192, True)
    with_turns, any_order = (backward_share(b.queries, b.keys, 2, 16, 16, 8192, hop, 1, MEASURED_HEADS)
                             for hop in (HOP_STEPS, None))
    seconds = [flops / (tflops * 1e12) - sides for tflops in (MEASURED_ANY_ORDER, MEASURED_TURNS)]
    return seconds[0] / seconds[1], with_turns / any_order


def predicted(D, B, H, G, T):
    """TFLOP/s of forward, of backward in any order, of deterministic backward."""
    flops = 2 * B * H * T * T * D  # two products, half of each
    f, b = forward(D), backward(D)
    rates = [f.ceiling * forward_share(f, D, B, H, G, T)]
    for any_order in (D < 256 or H == G, False):  # at 256 several heads a group take turns all the same
        rate = b.ceiling * backward_share(b.queries, b.keys, B, H, G, T, None if any_order else HOP_STEPS,
                                          1 if D == 256 else 2, backward_at_once(D, H // G, T))
        rates.append(2.5 * flops / (2.5 * flops / (rate * 1e12) + backward_sides(D, B, H, T, any_order)) / 1e12)
    return rates


# --- The page ---

HEAD = """## Ceilings, by arithmetic

Written by `scripts/hopper_ceiling.py`. **Nothing in it was measured by this project.**

A ceiling is 790 TFLOP/s, what power allows a large bf16 product on an H200, times the tensor cores' clocks over those of the busiest unit
(in a clock 16 exp2, 128 bytes of shared memory, four instructions), as if no unit waited for another.
"""

TABLE_HEAD = """| head dim | forward: queries x keys, ceiling | backward |
|---|---|---|"""
UNITS = {"mma": "tensor cores", "exp": "exp2", "shared": "shared memory", "issue": "issue"}

SCHEDULE = """By the kernels' schedule, causal, B = 2, 64 heads, TFLOP/s (half of the matrix, backward 2.5 times forward):

- A tile that the diagonal cuts costs a whole one. Every read hits the L2 cache.
- A tile of queries takes {least:.0f} to {most:.0f} clocks beyond its steps, by a simulation with guessed latencies.
- A block of backward takes two steps to start. A turn at dQ begins {hop} steps after the turn before began, which gives
  [FlashAttention-3's measured ratio](https://github.com/Dao-AILab/flash-attention/pull/1893) of turns to any order. Passes over delta and
  dQ run at 4.3 TB/s.
"""
SCHEDULE_HEAD = """| head dim | T | forward | backward, any order | in turns |
|---|---|---|---|---|"""

LENGTHS = {64: (1024, 16384), 128: (1024, 16384), 256: (4096,)}


def ceiling_cell(tile):
    """A tile, its ceiling, and the unit that sets it."""
    busiest = max(UNITS, key=lambda unit: getattr(tile, unit))
    return f"{tile.queries} x {tile.keys}, {tile.ceiling:.0f} by {UNITS[busiest]}"


def lines():
    assert abs(MULTIPROCESSORS * 2 * FMA * 1.83e9 / 1e12 - SHEET_TFLOPS) < 0.1
    measured, modeled = turns_of_any_order()
    assert abs(measured - modeled) < 0.004, f"HOP_STEPS gives {modeled:.3f} of any order, measured was {measured:.3f}"
    text = [HEAD, TABLE_HEAD]
    for D in HEAD_DIMS:
        text.append(f"| {D} | {ceiling_cell(forward(D))} | {ceiling_cell(backward(D))} |")
    between = [clocks_between(D) for D in HEAD_DIMS]
    text += ["", SCHEDULE.format(least=min(between), most=max(between), hop=HOP_STEPS), SCHEDULE_HEAD]
    for D, lengths in LENGTHS.items():
        for T in lengths:
            text.append(f"| {D} | {T} | " + " | ".join(f"{r:.0f}" for r in predicted(D, 2, 64, 64, T)) + " |")
    return "\n".join(text) + "\n"


def main():
    return write_or_check(tables_as_blocks(lines()), PAGE, sys.argv[1:] == ["--check"], "docs/internals/hopper.md has not what scripts/hopper_ceiling.py "
                          "writes: put that in its place", part=True)


if __name__ == "__main__":
    sys.exit(main())
