#include "runtime/text/log.h"
#include "runtime/files/file_read.h"  // is_pipe
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/say.h"      // say, say_list, say_warning
#include "runtime/machine/text_add.h" // text_add
#include "runtime/text/event_file.h"  // event_file_open, event_file_add
#include "runtime/text/json.h"        // json_writer
#include <errno.h>                    // errno
#include <fcntl.h>                    // open
#include <math.h>                     // isfinite
#include <stdarg.h>                   // va_list
#include <stdlib.h>                   // getenv
#include <string.h>                   // strerror
#include <sys/ioctl.h>                // TIOCGWINSZ
#include <sys/stat.h>                 // mkdir
#include <time.h>                     // clock_gettime
#include <unistd.h>                   // isatty, write

// ---- the start-up report ----

void log_row(const char *key, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("%-18s ", key);
    say_list(stdout, format, arguments);
    putchar('\n');
    va_end(arguments);
}

// text = bytes in the largest fitting unit, as 3.25 GiB; returns text.
const char *log_bytes(char text[LOG_NUMBER], int64_t bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1023.995 && unit < 6; unit++) // 1023.996 would be printed as 1024.00
        value /= 1024;
    snprintf(text, LOG_NUMBER, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
    return text;
}
// text = a number with up to four significant digits, or a whole one from 1000 on; returns text.
const char *log_digits(char text[LOG_NUMBER], double value) {
    snprintf(text, LOG_NUMBER, value >= 1000 ? "%.0f" : "%.4g", value);
    return text;
}
// text = a number with a comma before each three digits; returns text.
const char *log_count(char text[LOG_NUMBER], int64_t n) {
    char digits[LOG_NUMBER];
    const int length = snprintf(digits, sizeof digits, "%lld", (long long)n);
    const int first = digits[0] == '-';
    int used = 0;
    for (int i = 0; i < length; i++) {
        if (i > first && (length - i) % 3 == 0)
            text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = 0;
    return text;
}

// ---- log.jsonl ----

void log_make_folder(const char *option, const char *path) {
    char part[PATH_MAX];
    if (!*path || strlen(path) >= sizeof part)
        fail("--%s: a folder's name must have 1 to %d bytes", option, (int)sizeof part - 1);
    for (size_t i = 1; i <= strlen(path); i++) {
        if (path[i] && path[i] != '/')
            continue;
        snprintf(part, sizeof part, "%.*s", (int)i, path);
        struct stat status;
        if (mkdir(part, 0777) == 0 || (errno == EEXIST && stat(part, &status) == 0 && S_ISDIR(status.st_mode)))
            continue;
        fail("--%s %s: the folder %s cannot be made: %s; name another folder", option, path, part,
             errno == EEXIST ? "a file of that name exists" : strerror(errno));
    }
}

// Whether a line of log.jsonl is an object of a step after `last`.
static bool log_is_after(const char *line, int64_t last) {
    static const char key[] = "\"step\"";
    const char *const found = strstr(line, key);
    long long step = 0;
    return found && sscanf(found + sizeof key - 1, " : %lld", &step) == 1 && step > last;
}
// Returns how many bytes of an earlier log.jsonl stay when a run resumes: all before the first line that is cut short
// or of a step after `last`, which the run writes again. Other damaged lines stay. No file: 0. Unreadable: exits.
static int64_t log_end_of_step(const char *path, int64_t last) {
    FILE *const file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    int64_t end = 0;
    ssize_t bytes;
    if (!file && errno != ENOENT)
        fail("%s: cannot be read, to find the steps up to %lld: %s; name another folder by --out", path,
             (long long)last, strerror(errno));
    while (file && (bytes = getline(&line, &room, file)) > 0) {
        if (line[bytes - 1] != '\n' || log_is_after(line, last))
            break;
        end += bytes;
    }
    free(line);
    if (file)
        fclose(file);
    return end;
}

// Renames a log, a regular file that is not empty, to PATH.old, in place of an older one, and says so: the log may be
// all that tells of an earlier run. Ends the program where the log can't be renamed.
static void log_keep_former(const char *path) {
    char old[PATH_MAX];
    struct stat status;
    if (lstat(path, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0)
        return;
    const bool fits = (size_t)snprintf(old, sizeof old, "%s.old", path) < sizeof old;
    if (!fits || rename(path, old) != 0)
        fail(
            "%s: is the log of an earlier run and cannot be renamed to %s.old: %s; move it away, or name another folder "
            "by --out",
            path, path, strerror(fits ? errno : ENAMETOOLONG));
    say(stdout, "note: the log of an earlier run that is there is now %s\n", old);
}

void log_open(struct log *log, const char *folder, int64_t total_steps, int every, int64_t first_step, bool has_file,
              bool plain) {
    memset(log, 0, sizeof *log);
    log->file = -1;
    log->every = every > 0 ? every : 1;
    log->total_steps = total_steps;
    log->timed_from = -1;
    if (!has_file)
        return;
    log_make_folder("out", folder);
    if ((size_t)snprintf(log->path, sizeof log->path, "%s/log.jsonl", folder) >= sizeof log->path)
        fail("--out %s: the name is too long", folder);
    if (is_pipe(log->path))
        fail("%s: is a pipe, not a regular file; remove it, or name another folder by --out", log->path);
    if (first_step == 0)
        log_keep_former(log->path);
    log->good_bytes = first_step > 0 ? log_end_of_step(log->path, first_step) : 0;
    log->file = open(log->path, O_WRONLY | O_CREAT | (first_step > 0 ? 0 : O_TRUNC) | O_APPEND | O_CLOEXEC, 0666);
    if (log->file >= 0 && first_step > 0 && ftruncate(log->file, (off_t)log->good_bytes) != 0)
        errno = 0; // not a regular file: nothing in it can be removed
    if (log->file < 0)
        fail("%s: cannot be written: %s; name another folder by --out", log->path, strerror(errno));
    log->line = open_memstream(&log->line_text, &log->line_bytes);
    if (!log->line)
        fail("out of memory");
    const char *const kind = getenv("TERM");
    log->terminal = !plain && isatty(STDOUT_FILENO) && kind && strcmp(kind, "dumb") != 0;
}

void log_open_events(struct log *log, const char *folder, int64_t first_step) {
    if (!*folder || !log->line)
        return;
    log_make_folder("tensorboard-dir", folder);
    log->events = event_file_open(folder, first_step);
}

// Warns once that log.jsonl cannot be written, for the errno's reason, after a line break if a progress line is open.
static void log_warn_once(struct log *log, int error) {
    if (log->failed)
        return;
    log->failed = true;
    log_end_line(log);
    say_warning("%s: cannot be written: %s; the run goes on, steps may be missing from the log", log->path,
                strerror(error));
}
// Reports an errno, only the first time, and cuts off the incomplete line. Later lines are tried: room may come back.
static void log_write_failed(struct log *log, int error) {
    if (ftruncate(log->file, (off_t)log->good_bytes) != 0)
        errno = 0; // not a regular file: nothing in it can be removed
    log_warn_once(log, error);
}

// Appends bytes, a whole line, to log.jsonl. A failure is reported once, and the line is lost.
static void log_append(struct log *log, const char *text, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = write(log->file, text + done, bytes - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            log_write_failed(log, n == 0 ? ENOSPC : errno);
            return;
        }
        done += (size_t)n;
    }
    log->good_bytes += (int64_t)bytes;
}

// Whether a step has a progress line where lines are not drawn in place: step 1, each log->every-th and the last have.
static bool log_is_due(const struct log *log, int64_t step) {
    return step == 1 || step % log->every == 0 || step == log->total_steps;
}

// Writes "fp8": {LINEAR: {OPERAND: [share that saturated, share flushed to zero], ...}, ...}
static void log_write_fp8(struct json *json, const struct log_step *s) {
    static const char *const operands[LOG_FP8_OPERANDS] = {"input", "weight", "gradient"};
    json_object_begin(json, "fp8");
    for (int i = 0; i < s->num_fp8; i++) {
        json_object_begin(json, s->fp8[i].linear);
        for (int o = 0; o < LOG_FP8_OPERANDS; o++) {
            json_array_begin(json, operands[o]);
            json_double(json, NULL, s->fp8[i].saturated[o]);
            json_double(json, NULL, s->fp8[i].flushed[o]);
            json_array_end(json);
        }
        json_object_end(json);
    }
    json_object_end(json);
}

// Writes the time of day as a member, in UTC: "time": "2026-11-28T11:48:54.123Z".
static void log_write_time(struct json *json) {
    char text[64], milliseconds[LOG_NUMBER];
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(milliseconds, sizeof milliseconds, ".%03dZ", (int)(now.tv_nsec / 1000000));
    text_add(text, sizeof text, "%s", milliseconds);
    json_str(json, "time", text);
}

// Begins a line about a step for log.jsonl, which must be open. log_line_end appends the line.
static struct json log_line_begin(struct log *log, int64_t step) {
    struct json json = json_writer(log->line, false);
    rewind(log->line);
    json_object_begin(&json, NULL);
    json_int(&json, "step", step);
    log_write_time(&json);
    return json;
}
// Ends the line's object and appends the line to log.jsonl, and to the event file where there is one.
static void log_line_end(struct log *log, struct json *json) {
    json_object_end(json);
    fflush(log->line);
    log_append(log, log->line_text, log->line_bytes);
    if (log->events)
        event_file_add(log->events, log->line_text, log->line_bytes);
}

static void log_write_step(struct log *log, const struct log_step *s) {
    if (!log->line)
        return;
    struct json json = log_line_begin(log, s->step);
    json_int(&json, "tokens", s->tokens);
    if (s->targets != s->all_targets)
        json_int(&json, "targets", s->targets);
    if (s->batch > 0)
        json_int(&json, "batch", s->batch);
    json_double(&json, "loss", s->loss);
    json_double(&json, "lr", s->lr);
    json_double(&json, "grad_norm", s->grad_norm);
    json_double(&json, "step_ms", s->step_ms);
    json_double(&json, "tokens_per_second", s->tokens_per_second);
    json_double(&json, "mfu", s->mfu);
    json_double(&json, "mfu_palm", s->mfu_palm);
    json_int(&json, "peak_bytes", s->peak_bytes);
    if (s->has_comm) {
        json_int(&json, "comm_bytes", s->comm_bytes);
        json_double(&json, "comm_ms", s->comm_ms);
        json_double(&json, "comm_exposed_ms", s->comm_exposed_ms);
    }
    if (s->has_val_loss)
        json_double(&json, "val_loss", s->val_loss);
    if (s->num_fp8 > 0 && log_is_due(log, s->step))
        log_write_fp8(&json, s);
    log_line_end(log, &json);
}

void log_val_loss(struct log *log, int64_t step, double loss) {
    if (!log->line)
        return;
    struct json json = log_line_begin(log, step);
    json_double(&json, "val_loss", loss);
    log_line_end(log, &json);
}

void log_object(struct log *log, int64_t step, const char *key, void (*write)(struct json *json, const void *context),
                const void *context) {
    if (!log->line)
        return;
    struct json json = log_line_begin(log, step);
    json_object_begin(&json, key);
    write(&json, context);
    json_object_end(&json);
    log_line_end(log, &json);
}

// ---- the progress line ----

static double log_clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Returns the seconds left, by the mean wall time of steps since the first call, validation and samples included. The
// first call goes by step_s (NAN: not known) and sets *rough, since its own step has page faults and cold caches.
static double log_eta_s(struct log *log, int64_t step, double step_s, double now_s, bool *rough) {
    *rough = false;
    if (log->timed_from < 0) {
        log->timed_from = step;
        log->timed_from_s = now_s;
    }
    if (step == log->total_steps)
        return 0;
    *rough = step <= log->timed_from;
    if (*rough)
        return step_s * (double)(log->total_steps - step);
    return (now_s - log->timed_from_s) / (double)(step - log->timed_from) * (double)(log->total_steps - step);
}

// Returns hours, minutes and seconds, in `text`; or --:--:--, a constant, for NAN, infinity and above 10^12: unknown.
const char *log_duration(char text[LOG_NUMBER], double seconds) {
    if (!isfinite(seconds) || seconds > 1e12)
        return "--:--:--";
    const long long s = (long long)(seconds + 0.5);
    snprintf(text, LOG_NUMBER, "%02lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    return text;
}

enum { LOG_LINE = 256 };
// text = the progress line, the most important numbers first: a narrow terminal cuts the end off. A rough ETA has a ~.
static void log_progress_text(char text[LOG_LINE], const struct log_step *s, int64_t total_steps, double eta_s,
                              bool rough) {
    char number[LOG_NUMBER];
    const int digits = snprintf(number, sizeof number, "%lld", (long long)total_steps); // so that columns stay in line
    text[0] = 0;
    text_add(text, LOG_LINE, "step %*lld/%s", digits, (long long)s->step, number);
    text_add(text, LOG_LINE, "  loss %.4f  norm %.3f  lr %.2e", s->loss, s->grad_norm, s->lr);
    if (isfinite(s->tokens_per_second))
        text_add(text, LOG_LINE, "  %.0f tok/s", s->tokens_per_second);
    text_add(text, LOG_LINE, "  ETA %s%s", rough ? "~" : "", log_duration(number, eta_s));
    if (isfinite(s->mfu))
        text_add(text, LOG_LINE, "  MFU %.1f%%", 100 * s->mfu);
    text_add(text, LOG_LINE, "  %s", log_bytes(number, s->peak_bytes));
}

// Returns the terminal's columns; 80: unknown.
static int log_terminal_width(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void log_end_line(struct log *log) {
    if (log->drawn)
        putchar('\n');
    log->drawn = false;
    fflush(stdout);
}

// Draws the progress line in place or, in a pipe or file, prints the line of a step that is due.
static void log_draw(struct log *log, const struct log_step *s) {
    char text[LOG_LINE];
    bool rough;
    const double eta_s = log_eta_s(log, s->step, 1e-3 * s->step_ms, log_clock_s(), &rough);
    log_progress_text(text, s, log->total_steps, eta_s, rough);
    if (log->terminal) {
        // One column stays free: a terminal wraps after its last one. ESC [K clears the rest of a longer line.
        printf("\r%.*s\033[K", log_terminal_width() - 1, text);
        log->drawn = true;
    } else if (log_is_due(log, s->step))
        printf("%s\n", text);
    fflush(stdout);
}

// ---- a step ----

void log_step(struct log *log, const struct log_step *s) {
    log_write_step(log, s);
    log_draw(log, s);
}

void log_event(struct log *log, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    log_end_line(log);
    say_list(stdout, format, arguments);
    putchar('\n');
    fflush(stdout);
    va_end(arguments);
}

// Ends the progress line, closes log.jsonl and the event file, and frees what the log owns.
void log_close(struct log *log) {
    log_end_line(log);
    event_file_close(log->events);
    log->events = NULL;
    if (!log->line)
        return;
    if (close(log->file) != 0) // some file systems report a failed write here
        log_warn_once(log, errno);
    fclose(log->line);
    free(log->line_text);
    memset(log, 0, sizeof *log);
    log->file = -1;
}
