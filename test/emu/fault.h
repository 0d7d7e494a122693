// Plants a fault in what the emulated device runs, so that tests see how the program takes it. EMU_FAULT=KIND:NAME,
// where NAME is a part of a kernel's name, or of "cublasLtMatmul", "a graph (1)", the first that is made, ...:
//   wrong     such work does not run: its results are what the memory held
//   unsteady  every second piece of such work does not run
//   hang      such work never ends
//   refused   no such kernel is launched: the launch returns an error
//   illegal   such work reads an illegal address: neither it nor later work runs, and later calls return the error
//   unwaited  such work runs as the host's wait ends, behind the work that follows it, as where a wait is missing
// EMU_FAULT=capture: no stream begins to record.
// EMU_SLOW=NAME: such work takes 20 ms more, with or without EMU_FAULT.
#pragma once
#include <stdio.h>  // fprintf
#include <stdlib.h> // getenv, abort
#include <string.h> // strcmp, strncmp, strstr
#include <unistd.h> // pause, usleep

enum emu_fault { EMU_NO_FAULT, EMU_WRONG, EMU_UNSTEADY, EMU_HANG, EMU_REFUSED, EMU_ILLEGAL, EMU_UNWAITED, EMU_CAPTURE };
struct emu_planted {
    enum emu_fault kind;
    const char *name; // a part of the name of the work that has the fault
};
static inline struct emu_planted emu_read_fault(void) {
    static const char *const kinds[] = {
        "", "wrong:", "unsteady:", "hang:", "refused:", "illegal:", "unwaited:", "capture"};
    const char *const text = getenv("EMU_FAULT");
    for (int kind = EMU_WRONG; text && kind <= EMU_CAPTURE; kind++) {
        const size_t length = strlen(kinds[kind]);
        if (strncmp(text, kinds[kind], length) == 0)
            return {(enum emu_fault)kind, text + length};
    }
    if (text)
        fprintf(stderr, "EMU_FAULT=%s: expected KIND:NAME (see test/emu/fault.h)\n", text), abort();
    return {EMU_NO_FAULT, ""};
}
inline const struct emu_planted emu_planted = emu_read_fault();
inline bool emu_is_broken = false; // work has read an illegal address

// Whether work of this name does not run. Takes the time that EMU_SLOW asks for.
static inline bool emu_fault_stops(const char *name) {
    static int met = 0;
    static const char *const slow = getenv("EMU_SLOW");
    if (emu_is_broken)
        return true;
    if (slow && strstr(name, slow))
        usleep(20000);
    if (emu_planted.kind == EMU_NO_FAULT || !strstr(name, emu_planted.name))
        return false;
    switch (emu_planted.kind) {
    case EMU_NO_FAULT:
    case EMU_REFUSED:
    case EMU_UNWAITED:
    case EMU_CAPTURE: return false;
    case EMU_WRONG: return true;
    case EMU_UNSTEADY: return met++ % 2 == 1;
    case EMU_HANG:
        for (;;)
            pause();
    case EMU_ILLEGAL: emu_is_broken = true; return true;
    }
    return false;
}
