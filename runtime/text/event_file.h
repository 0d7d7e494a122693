// Event files, which TensorBoard reads: log.jsonl as scalars and texts. A file holds TFRecords (record_writer.h of
// tensorflow/core/lib/io), each an `Event` (tensorboard/compat/proto/event.proto). Neither needs a library.
#pragma once
#include <stddef.h>    // size_t
#include <stdint.h>    // int64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

struct event_file;

__BEGIN_DECLS
// Makes a new event file in a folder that exists; event_file_close frees the result. Its name sorts after other event
// files' there, except files a day or more ahead. It makes TensorBoard drop what earlier files have of steps after
// first_step. If the file can't be made, ends the program, naming --tensorboard-dir; if writing fails, only warns.
struct event_file *event_file_open(const char *folder, int64_t first_step);
// Writes a line of log.jsonl as an event of its "step": numbers as scalars, strings as texts, and a null loss or norm
// as NaN. Leaves out "time" and all other values. Ignores a line that is no object. Tags are paths, as
// fp8/qkv/input/saturated, or grouped, as loss/train. A line whose write fails is lost; the first failure is reported.
void event_file_add(struct event_file *events, const char *line, size_t bytes);
// Closes the file and frees `events`. Prints a warning if closing is the file's first failure. Does nothing for NULL.
void event_file_close(struct event_file *events);
__END_DECLS
