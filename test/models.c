// The tests of whole models in one program, which compiles the engine and its kernels once instead of once a test: that
// is most of the time of a build of all tests. The first argument names the test. Each test can be compiled to a
// program of its own, too.
#include <malloc.h>     // before testing.h, which may redefine free
#include "test/model.h" // before gpt.cuh, which it looks into
#include <dirent.h>     // scandir
#include <omp.h>        // omp_set_num_threads
#include "run/load.cuh"
#include "run/sample.cuh"
#include "run/save.cuh"
#include "run/start.h"
#include "test/config_strings.h"
#include "test/fails.h"
#include "test/forms.h"
#include "test/golden.h"
#include "test/reference.h"
#include "test/reference_golden.h"
#include "test/setup.h"
#include "test/svd.h"
#include "test/testing.h"

namespace op_block {
#include "test/op_block.c"
}
namespace op_fp8_gpt {
#include "test/op_fp8_gpt.c"
}
namespace op_golden {
#include "test/op_golden.c"
}
namespace op_gpt {
#include "test/op_gpt.c"
}
namespace op_lora {
#include "test/op_lora.c"
}
namespace op_muon_model {
#include "test/op_muon_model.c"
}
#undef MUON
namespace op_offload {
#include "test/op_offload.c"
}
#undef CLIPPED
namespace op_offload_units {
#include "test/op_offload_units.c"
}
namespace op_optimizer {
#include "test/op_optimizer.c"
}
namespace op_zoo {
#include "test/op_zoo.c"
}
#undef BATCH
#undef LLAMA
#undef SMALL
namespace op_huggingface {
#include "test/op_huggingface.c"
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*main)(void);
    } tests[] = {
        {"op_block", op_block::main},
        {"op_fp8_gpt", op_fp8_gpt::main},
        {"op_golden", op_golden::main},
        {"op_gpt", op_gpt::main},
        {"op_lora", op_lora::main},
        {"op_muon_model", op_muon_model::main},
        {"op_offload", op_offload::main},
        {"op_offload_units", op_offload_units::main},
        {"op_optimizer", op_optimizer::main},
        {"op_zoo", op_zoo::main},
        {"op_huggingface", op_huggingface::main},
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (argc == 2 && strcmp(argv[1], tests[i].name) == 0)
            return tests[i].main();
    fprintf(stderr, "%s: expected a test's name, such as %s\n", argv[0], tests[0].name);
    return 2;
}
