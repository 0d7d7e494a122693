#include "runtime/text/event_file.h"
#include "runtime/machine/error.h"   // fail
#include "runtime/machine/say.h"     // say_warning
#include "runtime/text/json_parse.h" // json_parse_object
#include <dirent.h>                  // opendir
#include <errno.h>                   // errno
#include <fcntl.h>                   // open
#include <limits.h>                  // PATH_MAX
#include <math.h>                    // NAN
#include <stdio.h>                   // snprintf, sscanf
#include <stdlib.h>                  // calloc, realloc, free
#include <string.h>                  // memcpy, strlen
#include <time.h>                    // clock_gettime
#include <unistd.h>                  // write, gethostname

// ---- bytes and protocol buffers (protobuf.dev/programming-guides/encoding) ----

struct bytes {
    unsigned char *data;
    size_t length, room;
};
// Appends n bytes. Ends the program where there is no memory for them.
static void put(struct bytes *to, const void *from, size_t n) {
    if (to->length + n > to->room) {
        to->room = 2 * (to->length + n) + 256;
        to->data = (unsigned char *)realloc(to->data, to->room);
        if (!to->data)
            fail("out of memory for an event file");
    }
    if (n > 0)
        memcpy(to->data + to->length, from, n);
    to->length += n;
}
static void put_varint(struct bytes *to, uint64_t value) {
    do {
        const unsigned char byte = (unsigned char)((value & 127) | (value > 127 ? 128 : 0));
        put(to, &byte, 1);
        value >>= 7;
    } while (value > 0);
}
enum wire { WIRE_VARINT = 0, WIRE_DOUBLE = 1, WIRE_BYTES = 2, WIRE_FLOAT = 5 };
static void put_tag(struct bytes *to, int field, enum wire wire) { put_varint(to, (uint64_t)field << 3 | wire); }
static void put_int(struct bytes *to, int field, int64_t value) {
    put_tag(to, field, WIRE_VARINT);
    put_varint(to, (uint64_t)value);
}
// Appends a field that holds a string or a nested message of n bytes.
static void put_bytes_field(struct bytes *to, int field, const void *from, size_t n) {
    put_tag(to, field, WIRE_BYTES);
    put_varint(to, n);
    put(to, from, n);
}
static void put_text(struct bytes *to, int field, const char *text) { put_bytes_field(to, field, text, strlen(text)); }

// ---- records ----

// Returns the CRC-32C (RFC 3720, appendix B.4: "123456789" has 0xe3069283) as TFRecords mask it.
static uint32_t masked_crc(const void *data, size_t n) {
    uint32_t crc = ~UINT32_C(0);
    for (size_t i = 0; i < n; i++) {
        crc ^= ((const unsigned char *)data)[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82f63b78) : 0);
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + UINT32_C(0xa282ead8);
}

struct event_file {
    char path[PATH_MAX];
    int file;
    int64_t good_bytes; // length of the file up to the end of its last complete record
    bool failed;        // a failure to write was reported
    struct bytes event, summary, value, record;
};

// Prints a warning of a failure to write (error: an errno) if it is the first; later ones are silent.
static void report_failure(struct event_file *events, int error) {
    if (!events->failed)
        say_warning("%s: cannot be written: %s; the run goes on, steps may be missing in TensorBoard", events->path,
                    strerror(error));
    events->failed = true;
}
// Reports `error`, an errno, if it is the first. Cuts off an incomplete record, which would hide all records after it.
static void record_failed(struct event_file *events, int error) {
    if (ftruncate(events->file, (off_t)events->good_bytes) != 0)
        errno = 0; // not a regular file: nothing in it can be removed
    report_failure(events, error);
}
// Appends events->event as a little-endian record: u64 length, masked CRC of it, the data, masked CRC of the data.
static void write_record(struct event_file *events) {
    const uint64_t length = events->event.length;
    const uint32_t of_length = masked_crc(&length, sizeof length), of_data = masked_crc(events->event.data, length);
    struct bytes *record = &events->record;
    record->length = 0;
    put(record, &length, sizeof length);
    put(record, &of_length, sizeof of_length);
    put(record, events->event.data, length);
    put(record, &of_data, sizeof of_data);
    for (size_t done = 0; done < record->length;) {
        const ssize_t n = write(events->file, record->data + done, record->length - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            record_failed(events, n == 0 ? ENOSPC : errno);
            return;
        }
        done += (size_t)n;
    }
    events->good_bytes += (int64_t)record->length;
}

// ---- events ----

// Begins events->event with the protobuf fields Event {1 wall_time, 2 step}, and empties events->summary.
static void event_begin(struct event_file *events, int64_t step) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    events->event.length = events->summary.length = 0;
    put_tag(&events->event, 1, WIRE_DOUBLE);
    put(&events->event, &seconds, sizeof seconds);
    put_int(&events->event, 2, step);
}
// Adds events->value, which stays as it is, to the summary: Summary {1 value, ...}.
static void end_value(struct event_file *events) {
    put_bytes_field(&events->summary, 1, events->value.data, events->value.length);
}
// Adds Value {1 tag, 2 simple_value} to the summary.
static void add_scalar(struct event_file *events, const char *tag, double value) {
    const float number = (float)value;
    events->value.length = 0;
    put_text(&events->value, 1, tag);
    put_tag(&events->value, 2, WIRE_FLOAT);
    put(&events->value, &number, sizeof number);
    end_value(events);
}
// Adds Value {1 tag, 8 tensor {1 dtype, 2 shape, 8 string_val}, 9 metadata {1 plugin_data {1 plugin_name}}} to the
// summary. The text is Markdown to TensorBoard: each line is indented, which keeps it as it is.
static void add_text(struct event_file *events, const char *tag, const char *text) {
    enum { DT_STRING = 7 };
    static const unsigned char metadata[] = {1 << 3 | WIRE_BYTES, 6, 1 << 3 | WIRE_BYTES, 4, 't', 'e', 'x', 't'};
    struct bytes tensor = {NULL, 0, 0}, lines = {NULL, 0, 0};
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        put(&lines, "    ", 4);
        put(&lines, line, strcspn(line, "\n"));
        put(&lines, "\n", 1);
    }
    put_int(&tensor, 1, DT_STRING);
    put_bytes_field(&tensor, 2, NULL, 0);
    put_bytes_field(&tensor, 8, lines.data, lines.length);
    events->value.length = 0;
    put_text(&events->value, 1, tag);
    put_bytes_field(&events->value, 8, tensor.data, tensor.length);
    put_bytes_field(&events->value, 9, metadata, sizeof metadata);
    end_value(events);
    free(tensor.data);
    free(lines.data);
}

// Members of log.jsonl that TensorBoard shows in groups, by the tag's part before the slash; any other has its path for
// a tag. null_is_nan: null is a NaN or Inf, not a number that is not known.
static const struct {
    const char *member, *tag;
    bool null_is_nan;
} event_tags[] = {
    {"loss", "loss/train", true},
    {"val_loss", "loss/val", true},
    {"lr", "optimizer/lr", false},
    {"grad_norm", "optimizer/grad_norm", true},
    {"tokens_per_second", "speed/tokens_per_second", false},
    {"step_ms", "speed/step_ms", false},
    {"mfu", "speed/mfu", false},
    {"mfu_palm", "speed/mfu_palm", false},
    {"peak_bytes", "memory/peak_bytes", false},
    {"comm_bytes", "communication/bytes", false},
    {"comm_ms", "communication/ms", false},
    {"comm_exposed_ms", "communication/exposed_ms", false},
    {"tokens", "progress/tokens", false},
    {"targets", "progress/targets", false},
    {"batch", "progress/batch", false},
};

// Adds a value's numbers and strings to the summary, and null as NaN where event_tags says so. path: to the value, a/b.
static void add_member(struct event_file *events, const char *path, const json_t *value) {
    enum { PATH = 512 };
    static const char *const shares[] = {"saturated", "flushed"}; // the only arrays of log.jsonl are FP8's
    const char *tag = path, *name;
    bool null_is_nan = false;
    char inner[PATH];
    json_t *member;
    for (size_t i = 0; i < sizeof event_tags / sizeof *event_tags; i++)
        if (strcmp(event_tags[i].member, path) == 0) {
            tag = event_tags[i].tag;
            null_is_nan = event_tags[i].null_is_nan;
        }
    if (json_is_number(value) || (json_is_null(value) && null_is_nan))
        add_scalar(events, tag, json_is_null(value) ? NAN : json_number_value(value));
    else if (json_is_string(value))
        add_text(events, tag, json_string_value(value));
    json_object_foreach ((json_t *)value, name, member) {
        snprintf(inner, sizeof inner, "%s/%s", path, name);
        add_member(events, inner, member);
    }
    for (size_t i = 0; i < json_array_size(value) && i < sizeof shares / sizeof *shares; i++) {
        snprintf(inner, sizeof inner, "%s/%s", path, shares[i]);
        add_member(events, inner, json_array_get(value, i));
    }
}

void event_file_add(struct event_file *events, const char *line, size_t bytes) {
    struct error_text error;
    json_t *root, *member;
    const char *name;
    if (json_parse_object(&root, (const unsigned char *)line, bytes, events->path, &error))
        return;
    event_begin(events, json_integer_value(json_object_get(root, "step")));
    json_object_foreach (root, name, member)
        if (strcmp(name, "step") != 0 && strcmp(name, "time") != 0)
            add_member(events, name, member);
    json_decref(root);
    if (events->summary.length == 0)
        return;
    put_bytes_field(&events->event, 5, events->summary.data, events->summary.length);
    write_record(events);
}

// ---- the file ----

#define EVENT_FILE_PREFIX "events.out.tfevents."
// Returns the seconds for a new file's name, by which TensorBoard sorts: now, or after files there of up to 24 h ahead.
static long long seconds_of_name(const char *folder) {
    long long seconds = (long long)time(NULL), there;
    DIR *const opened = opendir(folder);
    const struct dirent *entry;
    while (opened && (entry = readdir(opened)) != NULL)
        if (sscanf(entry->d_name, EVENT_FILE_PREFIX "%lld.", &there) == 1 && there >= seconds &&
            there < seconds + 86400)
            seconds = there + 1;
    if (opened)
        closedir(opened);
    return seconds;
}

struct event_file *event_file_open(const char *folder, int64_t first_step) {
    static const char version[] = "brain.Event:2";
    static const unsigned char session_start[] = {1 << 3 | WIRE_VARINT, 1}; // SessionLog {1 status: START}
    struct event_file *events = (struct event_file *)calloc(1, sizeof *events);
    char host[256] = "host";
    if (!events)
        fail("out of memory");
    if (gethostname(host, sizeof host) != 0 || strchr(host, '/'))
        snprintf(host, sizeof host, "host");
    host[sizeof host - 1] = '\0';
    if ((size_t)snprintf(events->path, sizeof events->path, "%s/" EVENT_FILE_PREFIX "%010lld.%s.%ld.0", folder,
                         seconds_of_name(folder), host, (long)getpid()) >= sizeof events->path)
        fail("--tensorboard-dir %.500s: the name is too long", folder);
    events->file = open(events->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (events->file < 0)
        fail("--tensorboard-dir %s: no file can be made there: %s; name another folder", folder, strerror(errno));
    event_begin(events, 0);
    put_text(&events->event, 3, version);
    write_record(events);
    event_begin(events, first_step + 1);
    put_bytes_field(&events->event, 7, session_start, sizeof session_start);
    write_record(events);
    return events;
}

void event_file_close(struct event_file *events) {
    if (!events)
        return;
    if (close(events->file) != 0) // some file systems report a failed write here, where nothing can be cut off any more
        report_failure(events, errno);
    free(events->event.data);
    free(events->summary.data);
    free(events->value.data);
    free(events->record.data);
    free(events);
}
