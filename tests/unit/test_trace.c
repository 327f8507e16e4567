/* The trace reader: what it takes, and that it refuses everything else with file, line and reason. */
#define _GNU_SOURCE 1

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "trace.h"

#define TRACES VPMM_SOURCE_DIR "/tests/traces/"

static char error[512];

static bool parse(const char *text, size_t length, trace *out)
{
    FILE *in = length == 0 ? fopen("/dev/null", "r") : fmemopen((void *)text, length, "r");
    cr_assert_not_null(in);
    memset(error, 0, sizeof error);
    bool ok = trace_parse(in, "t.csv", out, error, sizeof error);
    fclose(in);
    return ok;
}

static trace good(const char *text)
{
    trace t;
    cr_assert(parse(text, strlen(text), &t), "%s", error);
    return t;
}

static trace good_file(const char *path)
{
    trace t;
    cr_assert(trace_read(path, &t, error, sizeof error), "%s", error);
    return t;
}

/* The text is refused, by a message that begins with `where` and has `reason` in it; nothing is left in the trace. */
static void refused_with(const char *text, size_t length, const char *where, const char *reason)
{
    trace t;
    cr_assert(!parse(text, length, &t), "taken: %s", text);
    cr_expect_eq(strncmp(error, where, strlen(where)), 0, "'%s' does not begin with '%s'", error, where);
    cr_expect_not_null(strstr(error, reason), "'%s' does not say '%s'", error, reason);
    cr_expect_null(t.events);
    cr_expect_eq(t.count, 0);
}

static void refused(const char *text, const char *where, const char *reason)
{
    refused_with(text, strlen(text), where, reason);
}

Test(trace, events_are_read_as_they_stand)
{
    trace t = good("op,id,bytes,stream,us\n"
                   "a,10,4096,0,0\n"
                   "a,7,18,3,5\n"
                   "f,10,4096,2,5\n");
    cr_assert_eq(t.count, 3);
    cr_expect_eq(t.mallocs, 2);
    cr_expect_eq(t.slots, 2);
    cr_expect_eq(t.streams, 4);
    cr_expect_eq(t.events[0].op, TRACE_MALLOC);
    cr_expect_eq(t.events[0].bytes, 4096);
    cr_expect_eq(t.events[0].slot, 0);
    cr_expect_eq(t.events[1].slot, 1);
    cr_expect_eq(t.events[1].stream, 3);
    cr_expect_eq(t.events[1].us, 5);
    cr_expect_eq(t.events[2].op, TRACE_FREE);
    cr_expect_eq(t.events[2].slot, 0);
    cr_expect_eq(t.events[2].stream, 2);
    trace_release(&t);
}

Test(trace, the_header_may_be_missing)
{
    trace t = good("a,0,1,0,0\n");
    cr_expect_eq(t.count, 1);
    trace_release(&t);
}

Test(trace, lines_may_end_in_cr_lf_and_the_last_one_in_nothing)
{
    trace t = good_file(TRACES "crlf_no_newline.csv");
    cr_assert_eq(t.count, 2);
    cr_expect_eq(t.events[1].us, 1);
    trace_release(&t);
}

Test(trace, an_id_comes_again_after_its_free_in_a_slot_of_its_own)
{
    trace t = good_file(TRACES "live_at_end.csv");
    cr_assert_eq(t.count, 4);
    cr_expect_eq(t.slots, 3);
    cr_expect_eq(t.events[3].slot, 2);
    cr_expect_eq(t.events[3].bytes, 2097153);
    trace_release(&t);
}

Test(trace, a_free_need_not_state_bytes)
{
    trace t = good("a,0,77,0,0\nf,0,,0,1\n");
    cr_expect_eq(t.events[1].bytes, 77);
    trace_release(&t);
}

Test(trace, the_largest_numbers_are_taken)
{
    trace t = good("a,18446744073709551615,281474976710656,255,18446744073709550\n");
    cr_expect_eq(t.events[0].bytes, TRACE_MAX_BYTES);
    cr_expect_eq(t.streams, TRACE_MAX_STREAMS);
    trace_release(&t);
}

Test(trace, many_ids_keep_their_slots)
{
    enum { N = 20000 };
    char *text = malloc(N * 64);
    size_t length = 0;
    for (int i = 0; i < N; i++)
        length += (size_t)sprintf(text + length, "a,%lld,%d,0,%d\n", i * 4294967296LL + i % 7, i + 1, i);
    for (int i = N - 1; i >= 0; i--)
        length += (size_t)sprintf(text + length, "f,%lld,%d,0,%d\n", i * 4294967296LL + i % 7, i + 1, N);
    trace t;
    cr_assert(parse(text, length, &t), "%s", error);
    cr_assert_eq(t.count, 2 * N);
    for (size_t i = 0; i < N; i++)
        cr_assert_eq(t.events[N + i].slot, N - 1 - i);
    trace_release(&t);
    free(text);
}

Test(trace, malformed_text_is_refused_with_file_line_and_reason)
{
    refused("op,id,bytes,stream,us\nx,0,1,0,0\n", "t.csv:2: ", "op 'x' is unknown");
    refused("alloc,0,1,0,0\n", "t.csv:1: ", "op 'alloc' is unknown");
    refused(",0,1,0,0\n", "t.csv:1: ", "op '' is unknown");
    refused("a,0,12a,0,0\n", "t.csv:1: ", "bytes '12a' is not a decimal number");
    refused("a,0,-5,0,0\n", "t.csv:1: ", "bytes '-5'");
    refused("a,+1,5,0,0\n", "t.csv:1: ", "id '+1'");
    refused("a,0, 5,0,0\n", "t.csv:1: ", "bytes ' 5'");
    refused("a,0,0x10,0,0\n", "t.csv:1: ", "bytes '0x10'");
    refused("a,0,1.5,0,0\n", "t.csv:1: ", "bytes '1.5'");
    refused("a,,5,0,0\n", "t.csv:1: ", "id is missing");
    refused("a,0,,0,0\n", "t.csv:1: ", "bytes is missing");
    refused("a,0,5,,0\n", "t.csv:1: ", "stream is missing");
    refused("a,0,5,0,\n", "t.csv:1: ", "us is missing");
    refused("a,0,18446744073709551616,0,0\n", "t.csv:1: ", "too large");
    refused("a,0,281474976710657,0,0\n", "t.csv:1: ", "at most 281474976710656");
    refused("a,18446744073709551616,1,0,0\n", "t.csv:1: ", "id '18446744073709551616' is too large");
    refused("a,0,1,256,0\n", "t.csv:1: ", "stream '256' is too large: at most 255");
    refused("a,0,1,0,99999999999999999999\n", "t.csv:1: ", "us '99999999999999999999' is too large");
    refused("a,0,0,0,0\n", "t.csv:1: ", "zero bytes");
    refused("a,0,5,0\n", "t.csv:1: ", "4 fields instead of 5");
    refused("a,0,5,0,0,0\n", "t.csv:1: ", "6 fields instead of 5");
    refused("a,0,5,0,0\n\nf,0,5,0,0\n", "t.csv:2: ", "an empty line");
    refused("op,id,size,stream,us\n", "t.csv:1: ", "op 'op' is unknown");
    refused("a,0,5,0,0\nop,id,bytes,stream,us\n", "t.csv:2: ", "op 'op' is unknown");
    refused("op,id,bytes,stream,us\n", "t.csv:2: ", "ends before its first event");
    refused("", "t.csv:1: ", "ends before its first event");
    refused_with("a,0,5\0000,0,0\n", 14, "t.csv:1: ", "NUL byte");
}

Test(trace, events_that_contradict_earlier_ones_are_refused)
{
    refused("a,5,1,0,0\na,5,1,0,1\n", "t.csv:2: ", "id 5 is allocated twice: it is live since line 1");
    refused("f,6,1,0,1\n", "t.csv:1: ", "id 6, which was never allocated");
    refused("a,5,1,0,0\nf,6,1,0,1\n", "t.csv:2: ", "id 6, which was never allocated");
    refused("a,5,1,0,0\nf,5,1,0,1\nf,5,1,0,2\n", "t.csv:3: ", "id 5, which was freed in line 2");
    refused("a,5,10,0,0\nf,5,11,0,1\n", "t.csv:2: ", "states 11 bytes; line 1 allocated 10");
    refused("a,5,10,0,0\nf,5,0,0,1\n", "t.csv:2: ", "states 0 bytes");
    refused("a,5,10,0,7\nf,5,10,0,6\n", "t.csv:2: ", "time goes backwards, from 7 to 6");
}

Test(trace, each_malformed_file_is_refused)
{
    static const char *const names[] = {
        "allocated_twice", "bad_number",       "blank_in_number", "bytes_overflow", "bytes_too_large", "empty",
        "empty_line",      "few_fields",       "freed_twice",     "header_again",   "header_only",     "id_overflow",
        "long_op",         "many_fields",      "missing_number",  "negative",       "nul_byte",        "other_bytes",
        "other_header",    "stream_too_large", "time_backwards",  "unknown_id",     "unknown_op",      "zero_bytes",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512], where[600];
        trace t;
        snprintf(path, sizeof path, TRACES "bad/%s.csv", names[i]);
        snprintf(where, sizeof where, "%s:", path);
        cr_expect(!trace_read(path, &t, error, sizeof error), "%s is taken", path);
        cr_expect_eq(strncmp(error, where, strlen(where)), 0, "'%s' does not name the file and a line", error);
    }
}

Test(trace, a_file_that_cannot_be_read_is_named)
{
    trace t;
    cr_expect(!trace_read("/nonexistent/x.csv", &t, error, sizeof error));
    cr_expect_str_eq(error, "/nonexistent/x.csv: No such file or directory");
    cr_expect(!trace_read("/", &t, error, sizeof error));
    cr_expect_not_null(strstr(error, "directory"), "%s", error);
}

Test(trace, a_message_is_cut_to_its_buffer)
{
    char small[12];
    trace t;
    memset(small, 'x', sizeof small);
    cr_expect(!trace_read(TRACES "bad/empty.csv", &t, small, sizeof small));
    cr_expect_eq(strnlen(small, sizeof small), sizeof small - 1);
}

Test(trace, scaling_multiplies_each_request_and_leaves_a_byte)
{
    trace t = good("a,0,1,0,0\na,1,1000,0,0\nf,1,1000,0,0\n");
    trace_scale(&t, 0.6);
    cr_expect_eq(t.events[0].bytes, 1);
    cr_expect_eq(t.events[1].bytes, 600);
    cr_expect_eq(t.events[2].bytes, 600);
    trace_release(&t);
}

Test(trace, small_requests_go_with_their_frees)
{
    trace t = good("a,0,99,0,0\na,1,100,0,0\nf,0,99,0,1\nf,1,100,0,2\n");
    trace_drop_below(&t, 100);
    cr_assert_eq(t.count, 2);
    cr_expect_eq(t.mallocs, 1);
    cr_expect_eq(t.events[0].slot, 1);
    cr_expect_eq(t.events[1].slot, 1);
    trace_release(&t);
}

Test(trace, the_first_stream_is_the_files_though_its_requests_are_dropped)
{
    trace t = good("a,0,99,3,0\na,1,100,1,0\nf,0,99,3,1\nf,1,100,1,2\n");
    trace_drop_below(&t, 100);
    cr_expect(trace_is_first_stream(&t, 3));
    cr_expect_not(trace_is_first_stream(&t, 1));
    trace_release(&t);
}

Test(trace, one_without_a_request_of_the_size_is_refused)
{
    static const char path[] = TRACES "two_streams.csv";
    char error[256];
    trace t;
    cr_assert(trace_load(path, 0.5, 0, &t, error, sizeof error), "%s", error);
    trace_release(&t);
    cr_assert(!trace_load(path, 1, UINT64_C(1) << 40, &t, error, sizeof error));
    cr_expect(strstr(error, "two_streams.csv: no request has 1099511627776 bytes or more"), "%s", error);
    cr_expect_null(t.events);
    cr_assert(!trace_load("/nonexistent/x.csv", 1, 0, &t, error, sizeof error));
}
