// What the emulator offers to a library's stand-in that is a shared object of its own. Each engine of a program has its
// own copy of the emulator, so that the stand-in finds it through the stream that it is given.
#pragma once
#include <functional> // std::function
#include <stddef.h>   // size_t
#include <stdint.h>   // uint64_t

struct emu_stream;
struct emu_services {
    uint64_t made;
    // cudaError_t each. Recorded by a capture, as a kernel is.
    int (*enqueue)(struct emu_stream *stream, const char *name, std::function<void()> run);
    int (*forbid_while_recording)(void);
    // Memory that the device can touch has all of that, in one allocation.
    bool (*holds)(const void *begin, size_t bytes);
};
static const uint64_t EMU_SERVICES_MADE = 0x656d755f73727663;
