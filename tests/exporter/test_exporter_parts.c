/*
 * Parts of the exporter, and of what it reads, by themselves: how numbers are written, and how a latency is counted.
 */
#include "support.h"

#include "base/stats.h"
#include "text.h"

/* A bucket holds what is at most its bound, and more than the one before. */
Test(exporter_parts, bounds_of_the_latency_buckets)
{
    static struct stats stats;
    static const struct {
        uint64_t ns;
        int bucket;
    } cases[] = {{0, 0},
                 {1000, 0},
                 {1001, 1},
                 {2000, 1},
                 {2001, 2},
                 {4000, 2},
                 {4001, 3},
                 {262144000, 18},
                 {262144001, VPMM_LATENCY_BUCKETS - 1},
                 {UINT64_MAX / 2, VPMM_LATENCY_BUCKETS - 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vpmm_latency latency[2];
        stats_read_latency(&stats, &latency[0]);
        stats_note_latency(&stats, cases[i].ns);
        stats_read_latency(&stats, &latency[1]);
        for (int j = 0; j < VPMM_LATENCY_BUCKETS; j++)
            require(latency[1].count[j] - latency[0].count[j] == (j == cases[i].bucket), "%lu ns, bucket %d",
                    cases[i].ns, j);
        require(latency[1].sum_ns - latency[0].sum_ns == cases[i].ns, "%lu ns", cases[i].ns);
    }
}

/* Whatever the locale's decimal point is. */
Test(exporter_parts, numbers_of_seconds)
{
    static const struct {
        uint64_t ns;
        const char *text;
    } cases[] = {{0, "0"},
                 {1, "0.000000001"},
                 {1000, "0.000001"},
                 {2500000000, "2.5"},
                 {10000000000, "10"},
                 {100000000, "0.1"},
                 {UINT64_MAX, "18446744073.709551615"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct text text = {.bound = 100};
        text_seconds(&text, cases[i].ns);
        text_append(&text, "", 1);
        require(!text.cut && !strcmp(text.bytes, cases[i].text), "%s, not %s", text.bytes, cases[i].text);
        text_free(&text);
    }
}

Test(exporter_parts, a_text_is_cut_at_its_bound_and_stays_so)
{
    struct text text = {.bound = 10};
    text_string(&text, "0123456789");
    cr_assert(!text.cut);
    text_string(&text, "x");
    cr_assert(text.cut);
    text_append(&text, "", 0);
    text_string(&text, "");
    cr_assert(text.cut);
    cr_assert_eq(text.used, 10);
    text_clear(&text);
    text_string(&text, "short");
    cr_assert(!text.cut);
    text_free(&text);
}
