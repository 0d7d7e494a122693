// bf16 matrix products by oneDNN's matmul primitive, on CPUs whose bf16 instructions it uses. A primitive is for one
// shape, layout and number of threads. It is made when the memory plan asks for its scratch memory, and kept. Executing
// it allocates less than 500 bytes, freed at its end. The same operands give the same bits wherever they lie, but maybe
// not with another number of threads: where C is small and the depth great, as in dweight, threads share the depth.
// oneDNN's kernels (brgemm) pack operands on the way: on a core that computes 228 GFLOP/s in bf16 the three products of
// GPT-2's layers run at 150 to 205. No kernel writes a transposed C: C^T = B^T A^T is no way around a slow layout.
#pragma once
#include "kernels/device.cuh"             // struct device, bf16
#include "kernels/matmul/backend_run.cuh" // struct matmul_library, dbias_sums
#include "kernels/matmul/fp32.cuh"        // gemm_fp32, where there is no primitive
#include "runtime/machine/error.h"        // fail
#include <oneapi/dnnl/dnnl.h>             // dnnl_primitive_t
#include <stdio.h>                        // snprintf
#include <stdlib.h>                       // calloc, free

enum { ONEDNN_PRODUCTS = 256 }; // primitives that are kept; a new one replaces the oldest

static void onednn_check(dnnl_status_t status, const char *what, const struct gemm *gemm) {
    if (status != dnnl_success)
        fail("oneDNN failed to %s of %lld x %lld x %lld: status %d", what, (long long)gemm->rows, (long long)gemm->cols,
             (long long)gemm->depth, (int)status);
}

// ---- where oneDNN 2 and 3 differ ----

// onednn_layout: a matrix's type, sizes and strides, as functions take it.
#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t onednn_layout;
static onednn_layout onednn_layout_of(const dnnl_memory_desc_t *made) { return *made; }
// Makes the layout of a matrix, sizes and strides of 2 dimensions. onednn_layout_free frees it.
static dnnl_status_t onednn_layout_make(dnnl_memory_desc_t *made, const dnnl_dims_t sizes, dnnl_data_type_t type,
                                        const dnnl_dims_t strides) {
    return dnnl_memory_desc_create_with_strides(made, 2, sizes, type, strides);
}
static void onednn_layout_free(dnnl_memory_desc_t *made) { dnnl_memory_desc_destroy(*made); }
static dnnl_status_t onednn_append_sum(dnnl_post_ops_t operations) {
    return dnnl_post_ops_append_sum(operations, 1, 0, dnnl_data_type_undef);
}
// Creates the description of c = a b + bias, bias NULL: none. The caller destroys *product.
static dnnl_status_t onednn_matmul_create(dnnl_primitive_desc_t *product, dnnl_engine_t engine, onednn_layout a,
                                          onednn_layout b, onednn_layout bias, onednn_layout c,
                                          dnnl_primitive_attr_t attributes) {
    return dnnl_matmul_primitive_desc_create(product, engine, a, b, bias, c, attributes);
}
#else
typedef const dnnl_memory_desc_t *onednn_layout;
static onednn_layout onednn_layout_of(const dnnl_memory_desc_t *made) { return made; }
static dnnl_status_t onednn_layout_make(dnnl_memory_desc_t *made, const dnnl_dims_t sizes, dnnl_data_type_t type,
                                        const dnnl_dims_t strides) {
    return dnnl_memory_desc_init_by_strides(made, 2, sizes, type, strides);
}
static void onednn_layout_free(dnnl_memory_desc_t *made) {}
static dnnl_status_t onednn_append_sum(dnnl_post_ops_t operations) { return dnnl_post_ops_append_sum(operations, 1); }
static dnnl_status_t onednn_matmul_create(dnnl_primitive_desc_t *product, dnnl_engine_t engine, onednn_layout a,
                                          onednn_layout b, onednn_layout bias, onednn_layout c,
                                          dnnl_primitive_attr_t attributes) {
    dnnl_matmul_desc_t operation;
    const dnnl_status_t status = dnnl_matmul_desc_init(&operation, a, b, bias, c);
    return status == dnnl_success ? dnnl_primitive_desc_create(product, &operation, attributes, engine, NULL) : status;
}
#endif

// ---- a product's primitive ----

// Says what a primitive is made for. All members are int64_t, so that there are no holes to compare.
struct onednn_key {
    int64_t rows, cols, depth, a_ld, b_ld, ld_out, a_transposed, b_transposed, sums, adds, has_bias, threads;
};
enum onednn_argument { ONEDNN_A, ONEDNN_B, ONEDNN_C, ONEDNN_SCRATCH, ONEDNN_BIAS, ONEDNN_ARGUMENTS };
struct onednn_product {
    struct onednn_key key;
    dnnl_primitive_t primitive;                  // NULL: oneDNN has none that uses the CPU's bf16 instructions
    dnnl_exec_arg_t arguments[ONEDNN_ARGUMENTS]; // their memory is named at each call
    size_t scratch_bytes;
};
struct onednn {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int64_t made;
    struct onednn_product products[ONEDNN_PRODUCTS];
};

static struct onednn_key onednn_key_of(const struct gemm *g, const struct device *dev) {
    const struct onednn_key key = {g->rows,        g->cols,   g->depth,        g->a.ld,
                                   g->b.ld,        g->ld_out, g->a.transposed, g->b.transposed,
                                   g->sum != NULL, g->add,    g->bias != NULL, dev->threads};
    return key;
}

struct onednn_layouts {
    dnnl_memory_desc_t of[ONEDNN_ARGUMENTS];
};
// Makes the layouts of a product's matrices, not its scratch's, for onednn_layouts_free. Ends the program on failure.
static void onednn_layouts_make(struct onednn_layouts *x, const struct gemm *g) {
    const struct {
        enum onednn_argument which;
        int64_t rows, cols, ld;
        bool transposed;
        dnnl_data_type_t type;
    } matrices[] = {{ONEDNN_A, g->rows, g->depth, g->a.ld, g->a.transposed, dnnl_bf16},
                    {ONEDNN_B, g->depth, g->cols, g->b.ld, g->b.transposed, dnnl_bf16},
                    {ONEDNN_C, g->rows, g->cols, g->ld_out, false, g->sum ? dnnl_f32 : dnnl_bf16},
                    {ONEDNN_BIAS, 1, g->cols, g->cols, false, dnnl_bf16}};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
        const int64_t ld = matrices[i].ld;
        const dnnl_dims_t sizes = {matrices[i].rows, matrices[i].cols};
        const dnnl_dims_t strides = {matrices[i].transposed ? 1 : ld, matrices[i].transposed ? ld : 1};
        onednn_check(onednn_layout_make(&x->of[matrices[i].which], sizes, matrices[i].type, strides),
                     "describe an operand of a product", g);
    }
}
static void onednn_layouts_free(struct onednn_layouts *x) {
    const enum onednn_argument made[] = {ONEDNN_A, ONEDNN_B, ONEDNN_C, ONEDNN_BIAS};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        onednn_layout_free(&x->of[made[i]]);
}

// Returns the attributes of the primitive of g: the caller passes scratch memory at execution, and where g->add the
// product is added to C. The caller destroys them. Ends the program on failure.
static dnnl_primitive_attr_t onednn_attributes(const struct gemm *g) {
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t operations;
    onednn_check(dnnl_primitive_attr_create(&attributes), "set up a product", g);
    onednn_check(dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user), "set up a product", g);
    if (g->add) {
        onednn_check(dnnl_post_ops_create(&operations), "set up a product", g);
        onednn_check(onednn_append_sum(operations), "set up a product", g);
        onednn_check(dnnl_primitive_attr_set_post_ops(attributes, operations), "set up a product", g);
        dnnl_post_ops_destroy(operations);
    }
    return attributes;
}

// Returns the chosen implementation's instruction set, as ":avx512_core_bf16", in the description's memory; NULL where
// it is not one of the fast ones, "brg...": the others convert operands or sum one product at a time.
static const char *onednn_instruction_set(const_dnnl_primitive_desc_t description) {
    const char *implementation = "";
    if (dnnl_primitive_desc_query(description, dnnl_query_impl_info_str, 0, &implementation) != dnnl_success)
        return NULL;
    return strncmp(implementation, "brg", 3) == 0 ? strchr(implementation, ':') : NULL;
}

// Creates the product's arguments, which name no memory yet, for onednn_product_free, and sets its scratch_bytes.
static void onednn_make_arguments(struct onednn_product *product, const struct onednn_layouts *layouts,
                                  const_dnnl_primitive_desc_t description, const struct gemm *g, dnnl_engine_t engine) {
    static const int names[ONEDNN_ARGUMENTS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD,
                                                DNNL_ARG_BIAS};
    const onednn_layout scratch = dnnl_primitive_desc_query_md(description, dnnl_query_scratchpad_md, 0);
    product->scratch_bytes = dnnl_memory_desc_get_size(scratch);
    for (int i = 0; i < ONEDNN_ARGUMENTS; i++) {
        product->arguments[i].arg = names[i];
        onednn_check(dnnl_memory_create(&product->arguments[i].memory,
                                        i == ONEDNN_SCRATCH ? scratch : onednn_layout_of(&layouts->of[i]), engine,
                                        DNNL_MEMORY_NONE),
                     "describe the memory of a product", g);
    }
}

// Fills *product, which onednn_product_free frees. Its primitive is NULL if oneDNN has no fast one; else text (n),
// unless NULL, gets the instruction set's name.
static void onednn_product_make(struct onednn_product *product, const struct gemm *g, dnnl_engine_t engine,
                                const struct device *dev, char *text, size_t n) {
    struct onednn_layouts layouts;
    dnnl_primitive_desc_t description;
    memset(product, 0, sizeof *product);
    product->key = onednn_key_of(g, dev);
    onednn_layouts_make(&layouts, g);
    dnnl_primitive_attr_t attributes = onednn_attributes(g);
    const dnnl_status_t status = onednn_matmul_create(&description, engine, onednn_layout_of(&layouts.of[ONEDNN_A]),
                                                      onednn_layout_of(&layouts.of[ONEDNN_B]),
                                                      g->bias ? onednn_layout_of(&layouts.of[ONEDNN_BIAS]) : NULL,
                                                      onednn_layout_of(&layouts.of[ONEDNN_C]), attributes);
    const char *instruction_set = status == dnnl_success ? onednn_instruction_set(description) : NULL;
    if (instruction_set) {
        onednn_check(dnnl_primitive_create(&product->primitive, description), "make a product", g);
        onednn_make_arguments(product, &layouts, description, g, engine);
        if (text)
            snprintf(text, n, "%s", instruction_set + 1);
    }
    if (status == dnnl_success)
        dnnl_primitive_desc_destroy(description);
    dnnl_primitive_attr_destroy(attributes);
    onednn_layouts_free(&layouts);
}
static void onednn_product_free(struct onednn_product *product) {
    if (product->primitive == NULL)
        return;
    dnnl_primitive_destroy(product->primitive);
    for (int i = 0; i < ONEDNN_ARGUMENTS; i++)
        dnnl_memory_destroy(product->arguments[i].memory);
}

// Returns the product, made now unless kept; a full table loses its oldest. Its primitive is NULL if none is fast.
static struct onednn_product *onednn_product_for(const struct gemm *g, const struct device *dev) {
    struct onednn *const onednn = (struct onednn *)dev->matmul->state;
    const struct onednn_key key = onednn_key_of(g, dev);
    const int64_t kept = gemm_min(onednn->made, ONEDNN_PRODUCTS);
    for (int64_t i = 0; i < kept; i++)
        if (memcmp(&onednn->products[i].key, &key, sizeof key) == 0)
            return &onednn->products[i];
    struct onednn_product *product = &onednn->products[onednn->made % ONEDNN_PRODUCTS];
    if (onednn->made++ >= ONEDNN_PRODUCTS)
        onednn_product_free(product);
    onednn_product_make(product, g, onednn->engine, dev, NULL, 0);
    return product;
}

// ---- the backend ----

static void onednn_close(struct matmul_library *library) {
    struct onednn *const onednn = (struct onednn *)library->state;
    for (int64_t i = 0; i < gemm_min(onednn->made, ONEDNN_PRODUCTS); i++)
        onednn_product_free(&onednn->products[i]);
    if (onednn->stream)
        dnnl_stream_destroy(onednn->stream);
    if (onednn->engine)
        dnnl_engine_destroy(onednn->engine);
    free(onednn);
}

// Opens the backend, as struct matmul_backend says: returns whether a product of usual size has a fast primitive.
static bool onednn_open(struct matmul_library *library, const struct device *dev) {
    struct onednn *onednn = (struct onednn *)calloc(1, sizeof *onednn);
    if (onednn == NULL)
        fail("no memory for oneDNN's products");
    library->state = onednn;
    char instruction_set[32] = "";
    if (dnnl_engine_create(&onednn->engine, dnnl_cpu, 0) == dnnl_success &&
        dnnl_stream_create(&onednn->stream, onednn->engine, dnnl_stream_default_flags) == dnnl_success) {
        floatX out;
        const struct gemm usual = gemm_forward(&out, NULL, NULL, &out, 512, 768, 768);
        struct onednn_product product;
        onednn_product_make(&product, &usual, onednn->engine, dev, instruction_set, sizeof instruction_set);
        onednn_product_free(&product);
    }
    if (!*instruction_set) {
        onednn_close(library);
        return false;
    }
    const dnnl_version_t *const version = dnnl_version();
    snprintf(library->description, sizeof library->description, "oneDNN %d.%d.%d bf16, %s", version->major,
             version->minor, version->patch, instruction_set);
    return true;
}

// Returns the bytes of workspace of gemm_onednn without dbias. Creates the product's primitive, unless there is one.
static size_t onednn_workspace_bytes(const struct gemm *g, const struct device *dev) {
    const struct onednn_product *product = onednn_product_for(g, dev);
    return product->primitive ? product->scratch_bytes : gemm_fp32_workspace_bytes(g, dev);
}

// Computes a gemm by its primitive or gemm_fp32. dbias (g->rows), unless NULL, = the column sums of the stored a, which
// has no gaps, or += where g->add. workspace: onednn_workspace_bytes or, with dbias, dbias_workspace_bytes if more.
static void gemm_onednn(const struct gemm *g, float *dbias, void *workspace, const struct device *dev) {
    const struct onednn *const onednn = (const struct onednn *)dev->matmul->state;
    struct onednn_product *product = onednn_product_for(g, dev);
    if (product->primitive == NULL) {
        gemm_fp32(g, dbias, workspace, dev);
        return;
    }
    const void *const memory[ONEDNN_ARGUMENTS] = {
        g->a.data, g->b.data, g->sum ? (const void *)g->sum : (const void *)g->out, workspace, g->bias};
    for (int i = 0; i < ONEDNN_ARGUMENTS; i++)
        onednn_check(dnnl_memory_set_data_handle(product->arguments[i].memory, (void *)(uintptr_t)memory[i]),
                     "pass an operand of a product", g);
    onednn_check(dnnl_primitive_execute(product->primitive, onednn->stream, g->bias ? ONEDNN_ARGUMENTS : ONEDNN_BIAS,
                                        product->arguments),
                 "compute a product", g);
    onednn_check(dnnl_stream_wait(onednn->stream), "compute a product", g);
    if (dbias)
        dbias_sums(dbias, g->a.data, g->depth, (int)g->rows, g->add, workspace, dev);
}
