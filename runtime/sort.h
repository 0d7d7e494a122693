// Orders for qsort.
#pragma once

// Compares two doubles, none of which is a NaN: from the least to the most.
static inline int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
