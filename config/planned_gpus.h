// The parser of --plan-gpu's value: a number of GPUs, and the name of their kind, which run/gpu_names.h looks up.
#pragma once
#include <ctype.h>  // isdigit, isspace
#include <stddef.h> // NULL
#include <stdlib.h> // strtol

// Returns where the name is in --plan-gpu's text: at 3090 in "2x3090". *count gets the 2, or 0 if only a name is there.
static inline const char *planned_gpus(const char *text, int *count) {
    char *end = NULL;
    *count = 0;
    while (isspace((unsigned char)*text))
        text++;
    const long number = isdigit((unsigned char)*text) ? strtol(text, &end, 10) : 0;
    if (number < 1 || number > 1 << 16)
        return text;
    const char *at = end;
    while (isspace((unsigned char)*at))
        at++;
    if ((*at | 0x20) == 'x')
        at++;
    else if (at[0] == '\xc3' && at[1] == '\x97') // the sign of multiplication
        at += 2;
    else
        return text; // "4090", "4060ti"
    while (isspace((unsigned char)*at))
        at++;
    if (!*at)
        return text;
    *count = (int)number;
    return at;
}
