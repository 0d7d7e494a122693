// Orders for qsort.
#pragma once

// Compares two doubles for qsort, the least first. Neither is a NaN.
static inline int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
