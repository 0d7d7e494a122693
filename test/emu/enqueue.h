// How a library's stand-in that is compiled into its caller enqueues work: test/emu/cublasLt.h, test/emu/nccl.h.
#pragma once
#include "test/emu/services.h" // std::function
#include "test/emu/stream.h"   // cudaStream_t

// Enqueues all that the device does; a library's stand-in calls it as well. `run` holds its arguments by value. other,
// position: as in struct emu_work.
cudaError_t emu_enqueue(cudaStream_t stream, const char *name, std::function<void()> run,
                        const struct emu_stream *other = NULL, uint64_t position = 0);
// Refuses a call that a capture forbids: marks every capture as spoiled, and returns CUDA's error. Returns cudaSuccess
// if nothing is recorded.
cudaError_t emu_forbid_while_recording(void);
// Says how long the running work takes on the device. Between two events of a stream the sum of these times counts as
// the elapsed time. Without such work, or with a copy in between, the real time does.
void emu_model_time(cudaStream_t stream, double seconds);
