// kernels/gpu_peak.cuh: names as drivers give them, and rates that are consistent.
#include "kernels/gpu_peak.cuh"
#include "test/testing.h"

static void known_names(void **state) {
    const struct {
        const char *name;
        double bf16, fp32;
    } known[] = {
        {"NVIDIA A100-SXM4-40GB", 312, 19.5},
        {"NVIDIA A100 80GB PCIe", 312, 19.5},
        {"NVIDIA A10", 125, 31.2},
        {"NVIDIA A40", 149.7, 37.4},
        {"NVIDIA RTX A6000", 154.8, 38.7},
        {"NVIDIA L4", 121, 30.3},
        {"NVIDIA L40", 181.05, 90.5},
        {"NVIDIA L40S", 362.05, 91.6},
        {"NVIDIA H100 80GB HBM3", 989.5, 67},
        {"NVIDIA H100 PCIe", 756.5, 51},
        {"NVIDIA H100 NVL", 835.5, 60},
        {"NVIDIA H200", 989.5, 67},
        {"NVIDIA H200 NVL", 835.5, 60},
        {"NVIDIA GH200 480GB", 989.5, 67},
        {"NVIDIA B200", 2250, 0},
        {"NVIDIA GB200", 2500, 80},
        {"NVIDIA B300 SXM6 AC", 2250, 75},
        {"NVIDIA GB300", 2500, 80},
        {"NVIDIA GeForce RTX 3090", 71, 35.6},
        {"NVIDIA GeForce RTX 4090", 165.2, 82.6},
        {"NVIDIA GeForce RTX 5090", 209.5, 104.8},
        {"NVIDIA RTX 6000 Ada Generation", 364.2, 91.1},
        {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 126},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_true(gpu_peak_flops(known[i].name, true) == 1e12 * known[i].bf16);
        assert_true(gpu_peak_flops(known[i].name, false) == 1e12 * known[i].fp32);
    }
}

// Checks names that hold another GPU's name, or a part of one, with other rates.
static void unknown_names(void **state) {
    const char *unknown[] = {"",
                             "NVIDIA A10G",
                             "NVIDIA A1000",
                             "NVIDIA H20",
                             "NVIDIA H2000",
                             "NVIDIA B2000",
                             "Tesla V100-SXM2-16GB",
                             "Quadro RTX 6000",
                             "NVIDIA GeForce RTX 4090 D",
                             "NVIDIA GeForce RTX 4090 Laptop GPU",
                             "NVIDIA GeForce RTX 3080 Ti",
                             "NVIDIA GeForce RTX 4080 SUPER",
                             "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
                             "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
                             "NVIDIA H100 80GB HBM3 MIG 3g.40gb"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        for (int with_bf16 = 0; with_bf16 < 2; with_bf16++)
            if (gpu_peak_flops(unknown[i], with_bf16) != 0)
                fail_msg("\"%s\" is taken for another GPU", unknown[i]);
}

// Checks the ratios of rates. On every NVIDIA GPU so far dense bf16 is 2 (GeForce), 4 or 14 to 32 times fp32. A rate
// with sparsity, or with sums in fp16, put here by mistake, would be 4 times fp32 on a GeForce and 8 times or more on
// the others.
static void ratios(void **state) {
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof *gpu_peaks; i++) {
        const double ratio = gpu_peaks[i].bf16_tflops / gpu_peaks[i].fp32_tflops;
        if (gpu_peaks[i].fp32_tflops == 0)
            continue;
        if (strstr(gpu_peaks[i].name, "GeForce") || strcmp(gpu_peaks[i].name, "L40") == 0)
            assert_true(ratio > 1.9 && ratio < 2.1);
        else if (ratio < 13.5 || ratio > 32)
            assert_true(ratio > 3.9 && ratio < 4.1);
    }
}

// Checks that each compute capability is one that a driver may report, and that no memory is mistyped: no card here has
// less than 8 GiB.
static void what_plans_take(void **state) {
    static const int capabilities[] = {80, 86, 89, 90, 100, 103, 120};
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof *gpu_peaks; i++) {
        bool is_known = false;
        for (size_t k = 0; k < sizeof capabilities / sizeof *capabilities; k++)
            is_known = is_known || gpu_peaks[i].capability == capabilities[k];
        assert_true(is_known && gpu_peaks[i].memory_gib > 8 && gpu_peaks[i].memory_gib < 300);
    }
    assert_true(gpu_peak_find("NVIDIA A100-SXM4-80GB")->memory_gib == 80);
    assert_true(gpu_peak_find("NVIDIA A100 80GB PCIe")->memory_gib == 80);
    assert_true(gpu_peak_find("NVIDIA A100-SXM4-40GB")->memory_gib == 40);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(known_names), cmocka_unit_test(unknown_names),
                                       cmocka_unit_test(ratios), cmocka_unit_test(what_plans_take)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
