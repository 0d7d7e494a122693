// What the emulator offers to a library's stand-in that is a shared object of its own. Each engine of a program has its
// own copy of the emulator, and the stand-in finds the right one through the stream that it is given.
#pragma once
#include <functional> // std::function
#include <stddef.h>   // size_t
#include <stdint.h>   // uint64_t

struct emu_stream;
struct emu_services {
    uint64_t made;
    // enqueue and forbid_while_recording return a cudaError_t. A capture records enqueued work as it records a kernel.
    int (*enqueue)(struct emu_stream *stream, const char *name, std::function<void()> run);
    int (*forbid_while_recording)(void);
    // Whether one allocation that the device can touch has all these bytes.
    bool (*holds)(const void *begin, size_t bytes);
};
static const uint64_t EMU_SERVICES_MADE = 0x656d755f73727663;
