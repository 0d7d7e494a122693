// kernels/gpu_peak.cuh: names as drivers give them, and rates that are consistent; run/gpu_names.h: names as people
// write them.
#include "kernels/gpu_peak.cuh"
#include "run/gpu_names.h"
#include "test/fails.h"
#include "test/testing.h"

static void known_names(void **state) {
    const struct {
        const char *name;
        double bf16, fp32;
    } known[] = {
        {"NVIDIA A100-SXM4-40GB", 312, 19.5},
        {"NVIDIA A100 80GB PCIe", 312, 19.5},
        {"NVIDIA A10", 125, 31.2},
        {"NVIDIA A10G", 70, 35},
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
        {"NVIDIA GeForce RTX 5050", 26.3, 13.2},
        {"NVIDIA GeForce RTX 5060", 38.4, 19.2},
        {"NVIDIA GeForce RTX 5070", 61.7, 30.9},
        {"NVIDIA GeForce RTX 5090", 209.5, 104.8},
        {"NVIDIA RTX 6000 Ada Generation", 364.2, 91.1},
        {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 126},
        {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, 110},
        {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 467.8, 117},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_true(gpu_peak_flops(known[i].name, 0, true) == 1e12 * known[i].bf16);
        assert_true(gpu_peak_flops(known[i].name, 0, false) == 1e12 * known[i].fp32);
    }
}

// Checks names that hold another GPU's name, or a part of one, with other rates.
static void unknown_names(void **state) {
    const char *unknown[] = {"",
                             "NVIDIA A1000",
                             "NVIDIA H20",
                             "NVIDIA H2000",
                             "NVIDIA B2000",
                             "Tesla V100-SXM2-16GB",
                             "Tesla T4",
                             "NVIDIA GeForce RTX 4060 Laptop GPU",
                             "Quadro RTX 6000",
                             "NVIDIA GeForce RTX 4090 D",
                             "NVIDIA GeForce RTX 4090 Laptop GPU",
                             "NVIDIA GeForce RTX 3080 Ti",
                             "NVIDIA GeForce RTX 4080 SUPER",
                             "NVIDIA GeForce RTX 5050 Laptop GPU",
                             "NVIDIA GeForce RTX 5070 Laptop GPU",
                             "NVIDIA RTX PRO 6000 Blackwell DC-24Q",
                             "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
                             "NVIDIA H100 80GB HBM3 MIG 3g.40gb"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        for (int with_bf16 = 0; with_bf16 < 2; with_bf16++)
            if (gpu_peak_flops(unknown[i], 0, with_bf16) != 0)
                fail_msg("\"%s\" is taken for another GPU", unknown[i]);
}

// Checks the ratios of rates. On every NVIDIA GPU so far dense bf16 is 2 (GeForce), 4 or 14 to 32 times fp32. A rate
// with sparsity, or with sums in fp16, put here by mistake, would be 4 times fp32 on a GeForce and 8 times or more on
// the others. Dense FP8 is twice dense bf16.
static void ratios(void **state) {
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof *gpu_peaks; i++) {
        const double ratio = gpu_peaks[i].bf16_tflops / gpu_peaks[i].fp32_tflops;
        if (gpu_peaks[i].fp8_tflops > 0)
            assert_true(fabs(gpu_peaks[i].fp8_tflops / gpu_peaks[i].bf16_tflops - 2) < 0.03);
        assert_int_equal(gpu_peaks[i].fp8_tflops > 0, gpu_peaks[i].capability >= 89);
        if (gpu_peaks[i].fp32_tflops == 0)
            continue;
        if (strstr(gpu_peaks[i].name, "GeForce") || strcmp(gpu_peaks[i].name, "L40") == 0 ||
            strcmp(gpu_peaks[i].name, "A10G") == 0)
            assert_true(ratio > 1.9 && ratio < 2.1);
        else if (ratio < 13.5 || ratio > 32)
            assert_true(ratio > 3.9 && ratio < 4.1);
    }
}

// Checks that each compute capability is one that a driver may report, and that no memory is mistyped: no card here has
// less than 7.9 GiB. Editions of a name stand together, the smaller first.
static void what_plans_take(void **state) {
    static const int capabilities[] = {70, 75, 80, 86, 89, 90, 100, 103, 120};
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof *gpu_peaks; i++) {
        bool is_known = false;
        for (size_t k = 0; k < sizeof capabilities / sizeof *capabilities; k++)
            is_known = is_known || gpu_peaks[i].capability == capabilities[k];
        assert_true(is_known && gpu_peaks[i].memory_mib > 8100 && gpu_peaks[i].memory_mib < 300000);
        assert_int_equal(gpu_peaks[i].capability < 80, gpu_peaks[i].bf16_tflops == 0);
        for (size_t k = 0; k < i; k++)
            if (strcmp(gpu_peaks[i].name, gpu_peaks[k].name) == 0)
                assert_true(k == i - 1 && gpu_peaks[i].memory_mib > gpu_peaks[k].memory_mib);
    }
    assert_int_equal(gpu_peak_find("NVIDIA A100-SXM4-80GB", 0)->memory_mib, 80 << 10);
    assert_int_equal(gpu_peak_find("NVIDIA A100 80GB PCIe", 0)->memory_mib, 80 << 10);
    assert_int_equal(gpu_peak_find("NVIDIA A100-SXM4-40GB", 0)->memory_mib, 40 << 10);
}

// Checks that a driver's count of bytes, some percent less than nvidia-smi's, tells editions of one name apart.
static void editions_are_told_apart_by_memory(void **state) {
    const char *const name = "NVIDIA GeForce RTX 3080";
    assert_int_equal(gpu_peak_find(name, 0)->memory_mib, 10240);
    assert_int_equal(gpu_peak_find(name, (size_t)(0.985 * 10240) << 20)->memory_mib, 10240);
    assert_int_equal(gpu_peak_find(name, (size_t)(0.985 * 12288) << 20)->memory_mib, 12288);
    assert_true(gpu_peak_flops(name, (size_t)12 << 30, true) == 61.3e12);
    assert_int_equal(gpu_peak_find("NVIDIA GeForce RTX 4060 Ti", (size_t)(0.98 * 16380) << 20)->memory_mib, 16380);
}

// Checks that names as people write them find their row, and that a row's own name in messages finds the row.
static void names_as_people_write_them(void **state) {
    static const struct {
        const char *text, *name;
    } known[] = {
        {"4090", "GeForce RTX 4090"},
        {"rtx 4090", "GeForce RTX 4090"},
        {"RTX4090", "GeForce RTX 4090"},
        {"NVIDIA GeForce RTX 4090", "GeForce RTX 4090"},
        {"2x3090", "GeForce RTX 3090"},
        {"8 x 3090", "GeForce RTX 3090"},
        {"a100-80", "A100 80GB PCIe"}, // the slower one
        {"a100 40gb", "A100-SXM4-40GB"},
        {"h100 sxm", "H100 80GB HBM3"},
        {"H100-SXM5-80GB", "H100 80GB HBM3"},
        {"h100 pcie", "H100 PCIe"},
        {"h200", "H200"},
        {"H200 NVL", "H200 NVL"},
        {"4060ti", "GeForce RTX 4060 Ti 8GB"},
        {"4060 Ti 16GB", "GeForce RTX 4060 Ti 16GB"},
        {"3080 12gb", "GeForce RTX 3080 12GB"},
        {"4070 ti super", "GeForce RTX 4070 Ti SUPER"},
        {"l4", "L4"},
        {"l40", "L40"},
        {"l40s", "L40S"},
        {"A10", "A10"},
        {"a10g", "A10G"},
        {"a6000", "RTX A6000"},
        {"6000 ada", "RTX 6000 Ada Generation"},
        {"5070", "GeForce RTX 5070"},
        {"pro 6000 max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition"},
        {"pro 6000 server", "RTX PRO 6000 Blackwell Server Edition"},
        {"gb200", "GB200"},
        {"B300 SXM6 AC", "B300"},
    };
    char name[GPU_NAME_MAX];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        assert_string_equal(gpu_name(name, gpu_asked(known[i].text)), known[i].name);
    for (int i = 0; i < GPU_PEAKS; i++)
        if (gpu_peaks[i].bf16_tflops > 0)
            assert_ptr_equal(gpu_asked(gpu_name(name, &gpu_peaks[i])), &gpu_peaks[i]);
    assert_null(gpu_asked(""));
}
static void ask_in_child(void *text) { gpu_asked((const char *)text); }
static void names_that_do_not_say_which(void **state) {
    assert_fails(ask_in_child, (void *)"h100", "'h100' may be 'H100 80GB HBM3', 'H100 PCIe' or 'H100 NVL'");
    assert_fails(ask_in_child, (void *)"A100", "'A100-SXM4-80GB'|'A100-SXM4-40GB'");
    assert_fails(ask_in_child, (void *)"rtx 6000", "'RTX A6000'|'RTX 6000 Ada Generation'|'RTX PRO 6000");
    assert_fails(ask_in_child, (void *)"pro 6000", "'RTX PRO 6000 Blackwell Workstation Edition', 'RTX PRO 6000|Max-Q");
    assert_fails(ask_in_child, (void *)"T4", "the T4 has compute capability 7.5|Ampere or newer");
    assert_fails(ask_in_child, (void *)"v100", "compute capability 7.0|Ampere or newer");
    assert_fails(ask_in_child, (void *)"2080Ti", "GeForce RTX 2080 Ti|Ampere or newer");
    static const char *const unknown[] = {
        "Voodoo 2", "rtx",
        "4090 D",   "4090 laptop",
        "90",       "2x",
        "0x4090",   "-",
        "40900",    "a name of more words than any row of the table could have, and some 1 2 3 4 5"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        assert_fails(ask_in_child, (void *)unknown[i], "is not a GPU whose data sheet is known|lists all");
}
static void numbers_of_gpus(void **state) {
    static const struct {
        const char *text, *name;
        int count;
    } known[] = {{"2x3090", "3090", 2},         {" 8 x H100", "H100", 8},
                 {"4\xc3\x97 4090", "4090", 4}, {"3090", "3090", 0},
                 {"4060ti", "4060ti", 0},       {"2x", "2x", 0},
                 {"0x3090", "0x3090", 0},       {"", "", 0},
                 {"16X l4", "l4", 16},          {"99999999999x4", "99999999999x4", 0}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int count = -1;
        assert_string_equal(planned_gpus(known[i].text, &count), known[i].name);
        assert_int_equal(count, known[i].count);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(known_names),
                                       cmocka_unit_test(unknown_names),
                                       cmocka_unit_test(ratios),
                                       cmocka_unit_test(what_plans_take),
                                       cmocka_unit_test(editions_are_told_apart_by_memory),
                                       cmocka_unit_test(names_as_people_write_them),
                                       cmocka_unit_test(names_that_do_not_say_which),
                                       cmocka_unit_test(numbers_of_gpus)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
