// The peak rate of a GPU, by NVIDIA's own figures, found by the name that the driver gives the GPU.
//
// TFLOP/s at the boost clock, dense: where a data sheet gives only the rate with 2:4 sparsity, the table has half of
// it. bf16 and fp8 are the tensor cores' rates with sums in fp32, which on GeForce cards are half of the rates with
// sums in fp16. fp32 is the rate of the ordinary cores, which is what matmuls without TF32 reach. 0: not known, or no
// such cores. The peak of a GPU that is not in the table is measured: one that shares its name with others of another
// rate, one whose sheet leaves a doubt, and every slice of a GPU (MIG).
//
// The table also has the memory's GB/s, the link to the host, and the memory that a plan may fill, as nvidia-smi says.
#pragma once
#include <ctype.h>   // isalnum
#include <stdbool.h> // bool
#include <stddef.h>  // size_t
#include <string.h>  // strcmp, strncmp, strlen

enum gpu_link { PCIE_3, PCIE_4, PCIE_4_8_LANES, PCIE_5, PCIE_5_8_LANES, NVLINK_C2C };
struct gpu_peak {
    const char *name;  // whole words of the driver's name; with a '$', the last words of it
    const char *words; // further words that people write of it, as its memory or its socket; "": none
    int memory_mib;
    double memory_gbps, bf16_tflops, fp32_tflops, fp8_tflops;
    enum gpu_link link;
    int capability; // compute capability: 10 major + minor
};

// A row whose words are part of another's comes after it: the first that fits is taken. Rows of one name are a GPU's
// editions, of growing memory. Rates that no sheet has: TFLOP/s = tensor cores x k x MHz (boost) / 10^6, k = 128 for
// GeForce from the RTX 30 on, 256 for professional cards, which gives the sheets' rates where there are some.
static const struct gpu_peak gpu_peaks[] = {
    // Without bf16, so that the engine does not run on them: they are here so that messages can say so
    {"T4", "Tesla 16GB", 15360, 320, 0, 0, 0, PCIE_3, 75},
    {"V100-SXM2-16GB", "Tesla PCIe", 16384, 900, 0, 0, 0, PCIE_3, 70},
    {"V100-SXM2-32GB", "Tesla PCIe", 32768, 900, 0, 0, 0, PCIE_3, 70},
    {"GeForce RTX 2080 Ti$", "11GB", 11264, 616, 0, 0, 0, PCIE_3, 75},
    // "NVIDIA A100 Tensor Core GPU" data sheet, 2021
    {"A100-SXM4-80GB", "", 81920, 2039, 312, 19.5, 0, PCIE_4, 80},
    {"A100 80GB PCIe", "", 81920, 1935, 312, 19.5, 0, PCIE_4, 80},
    {"A100-SXM4-40GB", "", 40960, 1555, 312, 19.5, 0, PCIE_4, 80},
    {"A100-PCIE-40GB", "", 40960, 1555, 312, 19.5, 0, PCIE_4, 80},
    // "NVIDIA A30 Tensor Core GPU" data sheet
    {"A30", "24GB", 24576, 933, 165, 10.3, 0, PCIE_4, 80},
    // "NVIDIA A10 Tensor Core GPU" data sheet; the A10G of Amazon's g5 has 80 multiprocessors and lower clocks
    {"A10", "24GB", 23028, 600, 125, 31.2, 0, PCIE_4, 86},
    {"A10G", "24GB", 23028, 600, 70, 35, 0, PCIE_4, 86},
    // "NVIDIA A40" data sheet
    {"A40", "48GB", 46068, 696, 149.7, 37.4, 0, PCIE_4, 86},
    // "NVIDIA Ampere GA102 GPU architecture" whitepaper, RTX A6000, RTX 3090 and RTX 3080; other rows by clocks
    {"RTX A6000$", "48GB", 49140, 768, 154.8, 38.7, 0, PCIE_4, 86},
    {"GeForce RTX 3060$", "12GB", 12288, 360, 25.5, 12.7, 0, PCIE_4, 86},
    {"GeForce RTX 3070$", "8GB", 8192, 448, 40.6, 20.3, 0, PCIE_4, 86},
    {"GeForce RTX 3080$", "10GB", 10240, 760, 59.5, 29.8, 0, PCIE_4, 86},
    {"GeForce RTX 3080$", "12GB", 12288, 912, 61.3, 30.6, 0, PCIE_4, 86},
    {"GeForce RTX 3090$", "24GB", 24576, 936, 71, 35.6, 0, PCIE_4, 86},
    // "NVIDIA L4", "NVIDIA L40" and "NVIDIA L40S" data sheets
    {"L4", "24GB", 23034, 300, 121, 30.3, 242, PCIE_4, 89},
    {"L40", "48GB", 46068, 864, 181.05, 90.5, 362, PCIE_4, 89},
    {"L40S", "48GB", 46068, 864, 362.05, 91.6, 733, PCIE_4, 89},
    // "NVIDIA Ada GPU architecture" whitepaper, RTX 4090, RTX 4080 and RTX 6000 Ada; other rows by clocks
    {"GeForce RTX 4060 Ti$", "8GB", 8188, 288, 44.1, 22.1, 88, PCIE_4_8_LANES, 89},
    {"GeForce RTX 4060 Ti$", "16GB", 16380, 288, 44.1, 22.1, 88, PCIE_4_8_LANES, 89},
    {"GeForce RTX 4070$", "12GB", 12282, 504, 58.3, 29.1, 117, PCIE_4, 89},
    {"GeForce RTX 4070 Ti SUPER$", "16GB", 16376, 672, 88.2, 44.1, 176, PCIE_4, 89},
    {"GeForce RTX 4080$", "16GB", 16376, 717, 97.5, 48.7, 195, PCIE_4, 89},
    {"GeForce RTX 4090$", "24GB", 24564, 1008, 165.2, 82.6, 330, PCIE_4, 89},
    {"RTX 6000 Ada Generation$", "48GB", 49140, 960, 364.2, 91.1, 728.5, PCIE_4, 89},
    // "NVIDIA H100 Tensor Core GPU" data sheet: 1979, 1513 and 1671 with sparsity
    {"H100 80GB HBM3", "SXM5", 81559, 3350, 989.5, 67, 1979, PCIE_5, 90},
    {"H100 PCIe", "80GB", 81559, 2000, 756.5, 51, 1513, PCIE_5, 90},
    {"H100 NVL", "94GB", 95830, 3900, 835.5, 60, 1671, PCIE_5, 90},
    // "NVIDIA H200 Tensor Core GPU" data sheet: 1979 and 1671 with sparsity
    {"H200 NVL", "141GB", 143771, 4800, 835.5, 60, 1671, PCIE_5, 90},
    {"H200", "141GB SXM5", 143771, 4800, 989.5, 67, 1979, PCIE_5, 90},
    // "NVIDIA GH200 Grace Hopper Superchip" data sheet: 1979 with sparsity
    {"GH200", "480GB 96GB", 97871, 4000, 989.5, 67, 1979, NVLINK_C2C, 90},
    // "NVIDIA Blackwell Architecture Technical Brief": a GPU of an HGX B200 4.5 PFLOP/s with sparsity, of a GB200 5.
    // Its fp32 rate differs between editions for the HGX B200.
    {"B200", "180GB SXM", 183359, 7700, 2250, 0, 4500, PCIE_5, 100},
    {"GB200", "186GB", 189471, 8000, 2500, 80, 5000, NVLINK_C2C, 100},
    // NVIDIA's page of the HGX platform: 36 PFLOP/s with sparsity for 8 B300, 600 TFLOP/s in fp32; of the GB300 NVL72:
    // 360 PFLOP/s for 72, with 288 GB each, taken to be shown as a B300's. The hosts of a B300 have PCIe 5.
    {"B300", "288GB SXM6 AC", 275040, 8000, 2250, 75, 4500, PCIE_5, 103},
    {"GB300", "288GB", 275040, 8000, 2500, 80, 5000, NVLINK_C2C, 103},
    // Whitepaper "NVIDIA RTX Blackwell GPU architecture": 5090, 5080, 5070. By clocks: others (5060, 5050: nvidia.com)
    {"GeForce RTX 5050$", "8GB", 8151, 320, 26.3, 13.2, 52.6, PCIE_5_8_LANES, 120},
    {"GeForce RTX 5060$", "8GB", 8151, 448, 38.4, 19.2, 76.8, PCIE_5_8_LANES, 120},
    {"GeForce RTX 5060 Ti$", "8GB", 8151, 448, 47.4, 23.7, 95, PCIE_5_8_LANES, 120},
    {"GeForce RTX 5060 Ti$", "16GB", 16311, 448, 47.4, 23.7, 95, PCIE_5_8_LANES, 120},
    {"GeForce RTX 5070$", "12GB", 12227, 672, 61.7, 30.9, 123.5, PCIE_5, 120},
    {"GeForce RTX 5070 Ti$", "16GB", 16303, 896, 87.9, 43.9, 176, PCIE_5, 120},
    {"GeForce RTX 5080$", "16GB", 16303, 960, 112.6, 56.3, 225, PCIE_5, 120},
    {"GeForce RTX 5090$", "32GB", 32607, 1792, 209.5, 104.8, 419, PCIE_5, 120},
    // "NVIDIA RTX Blackwell PRO GPU architecture" whitepaper. Max-Q: its data sheet, FP4 with sparsity 3511, 8 x bf16.
    // Server: by the clock in its product brief SP-12355; TF32 234 on NVIDIA's page, half of bf16.
    {"RTX PRO 6000 Blackwell Workstation Edition$", "96GB", 97887, 1792, 503.8, 126, 1007.6, PCIE_5, 120},
    {"RTX PRO 6000 Blackwell Max-Q Workstation Edition$", "96GB", 97887, 1792, 438.9, 110, 877.8, PCIE_5, 120},
    {"RTX PRO 6000 Blackwell Server Edition$", "96GB", 97887, 1597, 467.8, 117, 935.6, PCIE_5, 120},
};
enum { GPU_PEAKS = sizeof gpu_peaks / sizeof *gpu_peaks };

// Whether `name` has `words`, not empty, as whole words. With a '$' as their last letter they must end `name`.
static bool gpu_name_has(const char *name, const char *words) {
    size_t length = strlen(words);
    const bool at_end = words[length - 1] == '$';
    if (at_end)
        length--;
    for (const char *at = name; *at; at++)
        if (strncmp(at, words, length) == 0 && (at == name || !isalnum((unsigned char)at[-1])) &&
            (at_end ? at[length] == '\0' : !isalnum((unsigned char)at[length])))
            return true;
    return false;
}

// Returns the row of a GPU of this name and memory: of several editions of a name the smallest that has about `bytes`
// or more, or else the largest. Returns NULL where no row has the name, or the name is a slice's (MIG).
static const struct gpu_peak *gpu_peak_find(const char *name, size_t bytes) {
    const struct gpu_peak *found = NULL;
    const size_t slack = (size_t)1 << 30; // the least edition that has at least what the driver counts, about
    if (gpu_name_has(name, "MIG"))
        return NULL;
    for (int i = 0; i < GPU_PEAKS; i++) {
        const struct gpu_peak *const row = &gpu_peaks[i];
        const bool fits = found ? strcmp(row->name, found->name) == 0 : gpu_name_has(name, row->name);
        if (fits && (!found || ((size_t)found->memory_mib << 20) + slack < bytes))
            found = row;
    }
    return found;
}

// Returns the peak flop/s of dense matmuls of gpu_peak_find's row, in bf16 or in fp32 without TF32; 0 if not known.
static double gpu_peak_flops(const char *name, size_t bytes, bool with_bf16) {
    const struct gpu_peak *gpu = gpu_peak_find(name, bytes);
    return gpu ? 1e12 * (with_bf16 ? gpu->bf16_tflops : gpu->fp32_tflops) : 0;
}

// Returns the rate of pinned copies both ways at once, in 1e9 bytes a second each way. NVLink-C2C: 5/6 of its 450.
static double gpu_link_gbps(enum gpu_link link) {
    switch (link) {
    case PCIE_3: return 11;
    case PCIE_4: return 22;
    case PCIE_4_8_LANES: return 11;
    case PCIE_5: return 52;
    case PCIE_5_8_LANES: return 26;
    case NVLINK_C2C: return 375;
    }
    return 0;
}
