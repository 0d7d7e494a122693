// The libraries of a target, for --version: the version that was compiled for and, where known, the one loaded.
#pragma once
#include "runtime/machine/text_add.h" // text_add
#include "runtime/text/log.h"         // log_row
#include <stdio.h>                    // snprintf
#include <string.h>                   // strcmp, strcspn

enum { LIBRARY_VERSION = 64, LIBRARY_VARIANT = 96 };

// Prints a library's row. running: the version that is loaded, or NULL where the library does not tell it.
static void library_row(const char *name, const char *compiled, const char *running) {
    if (!running || strcmp(compiled, running) == 0)
        log_row(name, "%s", compiled);
    else
        log_row(name, "%s, compiled for %s", running, compiled);
}

#ifdef TARGET_CUDA
#include "kernels/device.cuh" // cudaRuntimeGetVersion
#include <cublasLt.h>         // cublasLtGetVersion
#ifdef HAVE_NCCL
#include <nccl.h> // ncclGetVersion
#endif

static const char *cuda_version_text(char text[LIBRARY_VERSION], int version) {
    snprintf(text, LIBRARY_VERSION, "%d.%d", version / 1000, version % 1000 / 10);
    return text;
}
// Writes a version of NCCL or cuBLASLt, 10000 major + 100 minor + patch, to text, as "12.3.4". Returns text.
static const char *library_version_text(char text[LIBRARY_VERSION], int version) {
    snprintf(text, LIBRARY_VERSION, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

// text = the version of NCCL that is loaded, which may differ between machines; "": none. Returns text.
static const char *library_variant(char text[LIBRARY_VARIANT]) {
    text[0] = 0;
#ifdef HAVE_NCCL
    int version = 0;
    char number[LIBRARY_VERSION];
    if (ncclGetVersion(&version) == ncclSuccess)
        snprintf(text, LIBRARY_VARIANT, "NCCL %.32s", library_version_text(number, version));
#endif
    return text;
}

static void libraries_print(void) {
    char compiled[LIBRARY_VERSION], running[LIBRARY_VERSION];
    int runtime = 0, driver = 0;
    if (cudaRuntimeGetVersion(&runtime) == cudaSuccess)
        library_row("CUDA", cuda_version_text(compiled, CUDART_VERSION), cuda_version_text(running, runtime));
    const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
    log_row("GPU driver", "%s%s", has_driver ? "for CUDA " : "none",
            has_driver ? cuda_version_text(running, driver) : "");
    library_row("cuBLASLt", library_version_text(compiled, CUBLAS_VERSION),
                library_version_text(running, (int)cublasLtGetVersion()));
#ifdef HAVE_NCCL
    int nccl = 0;
    if (ncclGetVersion(&nccl) == ncclSuccess)
        library_row("NCCL", library_version_text(compiled, NCCL_VERSION_CODE), library_version_text(running, nccl));
#else
    log_row("NCCL", "none: left out, or built where nccl.h was not found");
#endif
}

#else

#include "runtime/files/hash.h" // hash_library_version
#include "runtime/net/mpi.h"    // mpi_describe
#include <jansson.h>            // jansson_version_str
#include <pcre2.h>              // pcre2_config
#ifdef __GLIBC__
#include <gnu/libc-version.h> // gnu_get_libc_version
#endif
#ifdef HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h> // dnnl_version
#endif
#ifdef HAVE_OPENBLAS
#include <cblas.h> // openblas_get_config
#endif

#define LIBRARY_TEXT(...) #__VA_ARGS__
#define LIBRARY_VALUE(...) LIBRARY_TEXT(__VA_ARGS__)

static void library_print_onednn(void) {
#ifdef HAVE_ONEDNN
    char running[LIBRARY_VERSION];
    const dnnl_version_t *const version = dnnl_version();
    snprintf(running, sizeof running, "%d.%d.%d", version->major, version->minor, version->patch);
    library_row("oneDNN", LIBRARY_VALUE(DNNL_VERSION_MAJOR.DNNL_VERSION_MINOR.DNNL_VERSION_PATCH), running);
#else
    log_row("oneDNN", "none: left out, or built where oneapi/dnnl/dnnl.h was not found");
#endif
}
static void library_print_openblas(void) {
#ifdef HAVE_OPENBLAS
    const char *const config = openblas_get_config(); // the version, how it was built, the kernels that it chose
    log_row("OpenBLAS", "%s", config + (strncmp(config, "OpenBLAS ", 9) == 0 ? 9 : 0));
#else
    log_row("OpenBLAS", "none: left out, or built where cblas.h was not found");
#endif
}
static void library_print_mpi(void) {
    char text[256];
    mpi_describe(text, sizeof text);
    log_row("MPI", "%s", *text ? text : "none: left out, or built where no mpicc was found");
}

// text = what the libraries chose for this CPU, which may differ between machines; "": nothing known. Returns text.
static const char *library_variant(char text[LIBRARY_VARIANT]) {
    text[0] = 0;
#ifdef HAVE_ONEDNN
    snprintf(text, LIBRARY_VARIANT, "oneDNN's instruction set %#x", (unsigned)dnnl_get_effective_cpu_isa());
#endif
#ifdef HAVE_OPENBLAS
    text_add(text, LIBRARY_VARIANT, "%sOpenBLAS's core %s", *text ? ", " : "", openblas_get_corename());
#endif
    return text;
}

static void libraries_print(void) {
    char pcre2[LIBRARY_VERSION], *end;
    const char *jansson = NULL;
    library_print_onednn();
    library_print_openblas();
    library_print_mpi();
#if JANSSON_VERSION_HEX >= 0x020d00
    jansson = jansson_version_str();
#endif
    library_row("jansson", JANSSON_VERSION, jansson);
    log_row("xxHash", "%s", hash_library_version());
    pcre2_config(PCRE2_CONFIG_VERSION, pcre2);
    if ((end = strchr(pcre2, ' '))) // before the date
        *end = 0;
    library_row("PCRE2", LIBRARY_VALUE(PCRE2_MAJOR.PCRE2_MINOR), pcre2);
#ifdef __GLIBC__
    library_row("glibc", LIBRARY_VALUE(__GLIBC__.__GLIBC_MINOR__), gnu_get_libc_version());
#endif
}

#endif
