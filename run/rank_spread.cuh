// Finds how ranks differ in planned memory, GPU, instructions, libraries and kernels, for the report. Ranks may differ
// so, since all use one sum of gradients. What would let replicas drift apart is refused or agreed on elsewhere.
#pragma once
#include "run/libraries.cuh"          // library_variant
#include "run/run.cuh"                // struct run
#include "runtime/machine/text_add.h" // text_add

enum { RANK_TRAIT = 512, RANK_DIFFERS = 512 }; // bytes of texts, which are cut where they are longer

struct rank_range {
    int64_t least, most;
};
struct rank_spread {
    struct rank_range planned, activations; // bytes
    char differs[RANK_DIFFERS + 64];        // "rank 2, of 3 that do, has A where rank 0 has B"; "": no rank differs
};

enum { TRAIT_DEVICE, TRAIT_MATMUL, TRAIT_LIBRARY, TRAIT_ATTENTION, TRAITS };
struct rank_traits {
    char text[TRAITS][RANK_TRAIT];
};
// Sets the texts of this rank's traits, once attention's backend is chosen.
static void rank_traits_find(struct rank_traits *traits, const struct run *r) {
    char library[LIBRARY_VARIANT];
    memset(traits, 0, sizeof *traits);
    if (r->config->instructions) // device_describe also has the number of threads, which may differ
        snprintf(traits->text[TRAIT_DEVICE], RANK_TRAIT, "instructions%s", r->config->instructions);
    else
        device_describe(traits->text[TRAIT_DEVICE], RANK_TRAIT, &r->dev);
    snprintf(traits->text[TRAIT_MATMUL], RANK_TRAIT, "%s", matmul_describe(r->dev.matmul));
    snprintf(traits->text[TRAIT_LIBRARY], RANK_TRAIT, "%s", library_variant(library));
    snprintf(traits->text[TRAIT_ATTENTION], RANK_TRAIT, "attention by %.*s", (int)strcspn(r->attention.reason, "(") - 1,
             r->attention.reason);
}

// differs (RANK_DIFFERS) = "A where rank 0 has B" for each trait in which this rank differs, or "" if none does.
static void rank_traits_compare(char *differs, const struct rank_traits *mine, const struct rank_traits *first) {
    differs[0] = 0;
    for (int i = 0; i < TRAITS; i++)
        if (strcmp(mine->text[i], first->text[i]) != 0)
            text_add(differs, RANK_DIFFERS, "%s%s where rank 0 has %s", *differs ? ", " : "", mine->text[i],
                     first->text[i]);
}

static void rank_range_widen(struct rank_range *range, int64_t value) {
    range->least = value < range->least ? value : range->least;
    range->most = value > range->most ? value : range->most;
}

// Returns how ranks differ in r->model's plan and in traits, which is not at all for one rank. Every rank calls this.
static struct rank_spread rank_spread_of(const struct run *r) {
    const struct plan *plan = &r->model->timeline.plan;
    const int ranks = r->parallel ? r->config->ranks : 1;
    struct control *const control = r->parallel ? r->parallel->control : NULL;
    struct {
        int64_t planned, activations, differs;
    } mine = {(int64_t)plan->peak_bytes, (int64_t)plan->arena_bytes[ARENA_ACTIVATIONS], 0}, *all;
    struct rank_spread spread = {{mine.planned, mine.planned}, {mine.activations, mine.activations}, ""};
    struct rank_traits traits, first;
    rank_traits_find(&traits, r);
    first = traits;
    control_broadcast(control, &first, sizeof first, "what rank 0 computes by", false);
    char *const texts = (char *)calloc((size_t)ranks, RANK_DIFFERS);
    all = (__typeof__(all))calloc((size_t)ranks, sizeof *all);
    if (!texts || !all)
        fail("out of memory");
    char *const text = texts + (size_t)(ranks > 1 ? r->config->rank : 0) * RANK_DIFFERS;
    rank_traits_compare(text, &traits, &first);
    mine.differs = *text != 0;
    control_all_gather(control, all, &mine, sizeof mine, "what ranks plan", false);
    int others = 0, odd = 0;
    for (int i = 0; i < ranks; i++) {
        rank_range_widen(&spread.planned, all[i].planned);
        rank_range_widen(&spread.activations, all[i].activations);
        odd = all[i].differs && others == 0 ? i : odd;
        others += all[i].differs != 0;
    }
    if (others > 0) {
        control_all_gather(control, texts, text, RANK_DIFFERS, "what ranks compute by", false);
        snprintf(spread.differs, sizeof spread.differs, "rank %d, of %d that do, has %s", odd, others,
                 texts + (size_t)odd * RANK_DIFFERS);
    }
    free(all);
    free(texts);
    return spread;
}
