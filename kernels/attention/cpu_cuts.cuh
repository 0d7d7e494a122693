// Cuts attention's backward on the CPU into units of work (attention/cpu.cu, and in FP8 fp8/attention_cpu.cu).
// A unit is (b, KV head, segment). A segment is a run of the group's (query tile, query head) pairs, tile by tile; the
// runs are cut so that their visible areas are alike. A unit owns the dQ of its pairs, and sums dK and dV in fp32 in a
// place of its own. Where a KV head has several segments, their sums are added afterwards in the order of the segments.
// The cut depends only on the shape and the mask, the number of segments only on the sizes.
#pragma once
#include "kernels/attention/cpu_tiles.cuh" // struct flash

enum { FLASH_UNITS = 32 }; // keep a few dozen threads busy; each costs 8 * T * D bytes of sums

// The number of segments of a KV head: enough for FLASH_UNITS in all, but at most one for each (tile, head) pair.
static inline int flash_segments(const struct flash *f) {
    const int64_t heads = (int64_t)f->shape.B * f->Hkv, pairs = (int64_t)f->tiles * f->group;
    const int64_t wanted = (FLASH_UNITS + heads - 1) / heads;
    return (int)(wanted < pairs ? wanted : pairs);
}
// Says where segments begin: first (B, segments + 1) has the first pair of each segment of a sequence's KV heads, and
// pair i belongs to tile i / group. first isn't set for one segment; for more, B is at most FLASH_UNITS - 1.
struct flash_cuts {
    int segments, pairs; // of a KV head
    int first[3 * FLASH_UNITS];
};
// Fills *cuts, so that a KV head's segments have about the same visible area. A segment may be empty.
static void flash_cut(struct flash_cuts *cuts, const struct flash *f) {
    cuts->segments = flash_segments(f);
    cuts->pairs = f->tiles * f->group;
    for (int b = 0; cuts->segments > 1 && b < f->shape.B; b++) {
        const double area = f->group * flash_sequence_area(f, b);
        double before = 0;
        int pair = 0;
        for (int s = 0; s <= cuts->segments; s++) {
            while (pair < cuts->pairs) {
                const double own = flash_area(f, b, pair / f->group);
                if (before + 0.5 * own >= area * s / cuts->segments)
                    break;
                before += own;
                pair++;
            }
            cuts->first[b * (cuts->segments + 1) + s] = pair;
        }
    }
}
// Returns the first (tile, head) pair of segment s of sequence b's KV heads, or for s = segments the end of all pairs.
static inline int flash_segment_begin(const struct flash_cuts *cuts, int b, int s) {
    return cuts->segments > 1 ? cuts->first[b * (cuts->segments + 1) + s] : s * cuts->pairs;
}
// The number of panels from panel 0 to the end of the query tile of pair - 1. Hidden panels count. It is 0 for pair 0.
static inline int flash_reach(const struct flash *f, int pair) {
    const int reach = pair == 0 ? 0 : ((pair - 1) / f->group + 1) * f->strips;
    return reach < f->panels ? reach : f->panels;
}
// Fills `live` with the segments, in order, of sequence b's KV heads that visit `panel`. Returns how many there are.
static inline int flash_live_segments(int live[FLASH_UNITS], const struct flash *f, const struct flash_cuts *cuts,
                                      int b, int panel) {
    int count = 0;
    for (int s = 0; s < cuts->segments; s++) {
        const int begin = flash_segment_begin(cuts, b, s), end = flash_segment_begin(cuts, b, s + 1);
        if (begin < end && panel >= flash_begin(f, b, begin / f->group * f->strips) && panel < flash_reach(f, end))
            live[count++] = s;
    }
    return count;
}
