// The peak rate of a GPU, by NVIDIA's own figures, found by the name that the driver gives the GPU.
//
// TFLOP/s at the boost clock, dense. Data sheets like to print the rate with 2:4 sparsity, which is twice the dense
// one: where a sheet gives only that rate, the table has half of it. bf16 is the tensor cores' rate with sums in fp32,
// which on GeForce cards is half of the rate with sums in fp16. fp32 is the rate of the ordinary cores, which is what
// matmuls without TF32 reach. The peak of a GPU that is not in the table is measured: one that shares its name with
// others of another rate, one whose sheet leaves a doubt, and every slice of a GPU (MIG).
//
// The table also has what times are predicted with where nothing is measured: the memory's GB/s by the same sheets, of
// the slowest edition where a row stands for several, and the link to the host.
#pragma once
#include <ctype.h>   // isalnum
#include <stdbool.h> // bool
#include <string.h>  // strncmp, strlen

enum gpu_link { PCIE_4, PCIE_5, NVLINK_C2C };
struct gpu_peak {
    const char *name; // whole words of the driver's name; with a '$', the last words of it
    int capability;   // compute capability, ten times the major and the minor
    double bf16_tflops, fp32_tflops, memory_gbps;
    enum gpu_link link;
    double memory_gib; // that a driver shows of it, with ECC as it is delivered; of the smallest edition
};

// A row whose words are part of another's comes after it: the first that fits is taken.
static const struct gpu_peak gpu_peaks[] = {
    // "NVIDIA A100 Tensor Core GPU" data sheet, 2021
    {"A100-SXM4-80GB", 80, 312, 19.5, 2039, PCIE_4, 80},
    {"A100 80GB PCIe", 80, 312, 19.5, 1935, PCIE_4, 80},
    {"A100", 80, 312, 19.5, 1555, PCIE_4, 40},
    // "NVIDIA A30 Tensor Core GPU" data sheet
    {"A30", 80, 165, 10.3, 933, PCIE_4, 24},
    // "NVIDIA A10 Tensor Core GPU" data sheet; the A10G has other rates and is not meant
    {"A10", 86, 125, 31.2, 600, PCIE_4, 22.4},
    // "NVIDIA A40" data sheet
    {"A40", 86, 149.7, 37.4, 696, PCIE_4, 44.9},
    // "NVIDIA Ampere GA102 GPU architecture" whitepaper, tables of the RTX A6000, the RTX 3090 and the RTX 3080
    {"RTX A6000$", 86, 154.8, 38.7, 768, PCIE_4, 47.9},
    {"GeForce RTX 3090$", 86, 71, 35.6, 936, PCIE_4, 24},
    {"GeForce RTX 3080$", 86, 59.5, 29.8, 760, PCIE_4, 10},
    // "NVIDIA L4", "NVIDIA L40" and "NVIDIA L40S" data sheets
    {"L4", 89, 121, 30.3, 300, PCIE_4, 22.4},
    {"L40", 89, 181.05, 90.5, 864, PCIE_4, 44.9},
    {"L40S", 89, 362.05, 91.6, 864, PCIE_4, 44.9},
    // "NVIDIA Ada GPU architecture" whitepaper, tables of the RTX 4090, the RTX 4080 and the RTX 6000 Ada
    {"GeForce RTX 4090$", 89, 165.2, 82.6, 1008, PCIE_4, 23.9},
    {"GeForce RTX 4080$", 89, 97.5, 48.7, 717, PCIE_4, 15.9},
    {"RTX 6000 Ada Generation$", 89, 364.2, 91.1, 960, PCIE_4, 47.9},
    // "NVIDIA H100 Tensor Core GPU" data sheet: 1979, 1513 and 1671 with sparsity
    {"H100 80GB HBM3", 90, 989.5, 67, 3350, PCIE_5, 79.6},
    {"H100 PCIe", 90, 756.5, 51, 2000, PCIE_5, 79.6},
    {"H100 NVL", 90, 835.5, 60, 3900, PCIE_5, 93.5},
    // "NVIDIA H200 Tensor Core GPU" data sheet: 1979 and 1671 with sparsity
    {"H200 NVL", 90, 835.5, 60, 4800, PCIE_5, 140.4},
    {"H200", 90, 989.5, 67, 4800, PCIE_5, 140.4},
    // "NVIDIA GH200 Grace Hopper Superchip" data sheet: 1979 with sparsity
    {"GH200", 90, 989.5, 67, 4000, NVLINK_C2C, 95.5},
    // "NVIDIA Blackwell Architecture Technical Brief": a GPU of an HGX B200 4.5 PFLOP/s with sparsity, of a GB200 5.
    // Its fp32 rate differs between editions for the HGX B200.
    {"B200", 100, 2250, 0, 7700, PCIE_5, 179},
    {"GB200", 100, 2500, 80, 8000, NVLINK_C2C, 185},
    // NVIDIA's page of the HGX platform: 36 PFLOP/s with sparsity for 8 B300, 600 TFLOP/s in fp32; of the GB300 NVL72:
    // 360 PFLOP/s for 72 GPUs. Memory of both: 288 GB; the driver's figure was not looked up.
    {"B300", 103, 2250, 75, 7700, PCIE_5, 267},
    {"GB300", 103, 2500, 80, 8000, NVLINK_C2C, 267},
    // "NVIDIA RTX Blackwell GPU architecture" whitepaper, tables of the RTX 5090 and the RTX 5080
    {"GeForce RTX 5090$", 120, 209.5, 104.8, 1792, PCIE_5, 31.8},
    {"GeForce RTX 5080$", 120, 112.6, 56.3, 960, PCIE_5, 15.9},
    // "NVIDIA RTX Blackwell PRO GPU architecture" whitepaper; the Max-Q and Server editions have lower clocks
    {"RTX PRO 6000 Blackwell Workstation Edition$", 120, 503.8, 126, 1792, PCIE_5, 95.5},
};

// Whether `words` is in `name`, with no letter or digit right before or after it; words that end in '$': at its end.
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

// Returns the row of a GPU by the name that the driver gives it; NULL: it is not known, or a slice (MIG).
static const struct gpu_peak *gpu_peak_find(const char *name) {
    if (gpu_name_has(name, "MIG"))
        return NULL;
    for (size_t i = 0; i < sizeof gpu_peaks / sizeof *gpu_peaks; i++)
        if (gpu_name_has(name, gpu_peaks[i].name))
            return &gpu_peaks[i];
    return NULL;
}

// Returns the flop/s of dense matmuls, in bf16 with sums in fp32, or in fp32, by the GPU's name; 0: not known.
static double gpu_peak_flops(const char *name, bool with_bf16) {
    const struct gpu_peak *gpu = gpu_peak_find(name);
    return gpu ? 1e12 * (with_bf16 ? gpu->bf16_tflops : gpu->fp32_tflops) : 0;
}

// Returns the rate, in 1e9 bytes a second each way, that pinned copies reach while both directions are busy: of 16
// lanes of PCIe, and 5/6 of NVLink-C2C's 450.
static double gpu_link_gbps(enum gpu_link link) {
    switch (link) {
    case PCIE_4: return 22;
    case PCIE_5: return 52;
    case NVLINK_C2C: return 375;
    }
    return 0;
}
