// What of the emulator's Hopper no GPU can test: its compute capability can be set. test/cuda/unit_sm90.cu, which also
// runs on a GPU, tests the models of its instructions.
#include "kernels/tensor_map.cuh" // cudaGetDriverEntryPointByVersion
#include "test/testing.h"         // cmocka

static void an_unknown_driver_function_is_not_found(void **state) {
    void *function;
    enum cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, cudaEnableDefault, &found));
    assert_true(found == cudaDriverEntryPointSymbolNotFound && !function);
}

static void the_capability_is_what_is_asked_for(void **state) {
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    assert_int_equal(properties.major, 8);
    setenv("EMU_CAPABILITY", "9.0", 1);
    cuda_check(cudaGetDeviceProperties(&properties, 0));
    assert_int_equal(properties.major, 9);
    assert_int_equal(properties.minor, 0);
    unsetenv("EMU_CAPABILITY");
}

int main(void) {
    unsetenv("EMU_CAPABILITY");
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_unknown_driver_function_is_not_found),
                                       cmocka_unit_test(the_capability_is_what_is_asked_for)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
